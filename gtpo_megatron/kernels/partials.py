"""Partial sums of a softmax over part of the vocabulary, and their exact combination.

A *partial* describes the logits ``z_v`` of one token over some columns, relative to their own maximum ``m``, with
``d_v = (z_v - m) / T <= 0``:

- ``MAX``: ``m``, of the logits before the temperature;
- ``REST``: ``r = sum_{v != argmax} exp(d_v)``, so that the sum over all columns is ``1 + r``;
- ``WEIGHTED``: ``u = sum_v d_v exp(d_v) <= 0``;
- ``TARGET``: the target's logit if it is in these columns, else ``-inf``.

Then ``log p_y = (z_y - m) / T - log1p(r)`` and ``H = log1p(r) - u / (1 + r)``. The maximum's own term 1 is not part of
the float32 sum ``r``: at ``H = 1e-5`` nats ``r`` is about 1e-6, of which ``1 + r`` would keep one digit, and y of GTPO
is 1/H. `merge` combines partials of column tiles or of tensor-parallel ranks.
"""

from typing import NamedTuple

import torch
from torch import Tensor

MAX, REST, WEIGHTED, TARGET = range(4)
NUM_FIELDS = 4

LOWEST = -1e4
"""Replaces ``d = -inf``: its exp is 0 in float64, and 0 times it is 0, not NaN."""


class SoftmaxSums(NamedTuple):
    """The sums over the whole vocabulary that the backward pass needs, each ``[P]``.

    Attributes:
        maximum: largest logit, before the temperature.
        rest: ``r``; the probability of column v is ``exp(d_v) / (1 + r)``.
        surprise: ``-u / (1 + r)``, which is ``H - log1p(r)``.
    """

    maximum: Tensor
    rest: Tensor
    surprise: Tensor


def empty_table(num_parts: int, num_tokens: int, *, like: Tensor) -> Tensor:
    """``[num_parts, fields, num_tokens]`` partials of no columns, the neutral element of `merge`."""
    table = like.new_zeros((num_parts, NUM_FIELDS, num_tokens))
    table[:, MAX] = -torch.inf
    table[:, TARGET] = -torch.inf
    return table


def merge(table: Tensor, inverse_temperature: Tensor | float) -> Tensor:
    """Merges the partials of disjoint columns.

    With ``m = max_s m_s``, ``w_s = exp((m_s - m) / T)`` and the ``k`` whose maximum is ``m``:
    ``r = r_k + sum_{s != k} w_s (1 + r_s)`` and ``u = sum_s w_s (u_s + (m_s - m) / T (1 + r_s))``.

    Args:
        table: ``[S, fields, P]``, partials of disjoint columns.
        inverse_temperature: ``1 / T``, a float or ``[P]``.

    Returns:
        ``[fields, P]`` float64. Communication: none.
    """
    parts = table.double()
    maximum, winner = parts[:, MAX].max(dim=0)
    distance = ((parts[:, MAX] - maximum) * inverse_temperature).clamp(min=LOWEST)
    weight = distance.exp()
    # A part without columns has r = 0 and no maximum; its weight 0 keeps a term 1 out of the sums.
    others = weight.scatter(0, winner[None], 0.0)
    merged = parts.new_empty(parts.shape[1:])
    merged[MAX] = maximum
    merged[REST] = (weight * parts[:, REST] + others).sum(0)
    merged[WEIGHTED] = (weight * (parts[:, WEIGHTED] + distance * (1 + parts[:, REST]))).sum(0)
    merged[TARGET] = parts[:, TARGET].amax(0)
    return merged


def finish(partial: Tensor, inverse_temperature: Tensor | float) -> tuple[Tensor, Tensor, SoftmaxSums]:
    """Log-probability, entropy, and the sums that the backward pass reads.

    Args:
        partial: ``[fields, P]`` float64, over the whole vocabulary.
        inverse_temperature: ``1 / T``, a float or ``[P]``.

    Returns:
        ``log p_y`` ``[P]``, ``H`` ``[P]``, and `SoftmaxSums`; all float64.
    """
    log_normaliser = torch.log1p(partial[REST])
    surprise = -partial[WEIGHTED] / (1 + partial[REST])
    logprobs = (partial[TARGET] - partial[MAX]) * inverse_temperature - log_normaliser
    sums = SoftmaxSums(partial[MAX], partial[REST], surprise)
    return logprobs, log_normaliser + surprise, sums
