"""Entropy weights ``x[i,t]`` on O+ and ``y[j,t]`` on O-: each value relative to the mean of its peers."""

from typing import Literal

import torch
from torch import Tensor

from gtpo_megatron.algorithms.batch.reduction import KeyReduction
from gtpo_megatron.algorithms.credit.comparison import Comparison
from gtpo_megatron.algorithms.exact_sum import combine_by_key_, exact_sum, significant
from gtpo_megatron.errors import DataError

LARGEST_SHARE = 2.0**100
"""Arithmetic shares are bounded by the number of peers, geometric ones by nothing; credit is float32, up to 2**128."""


def relative_weight(
    weight: Tensor,
    peers: Comparison,
    mean: Literal["arithmetic", "geometric"],
    *,
    compared: Tensor | None,
    reduction: KeyReduction,
) -> Tensor:
    """``x[i,t] = H[i,t] / sum_{k in O+} H[k,t] * d_t``, and ``y[j,t]`` with ``1/H``, O- and ``h_t``.

    Geometric [I App. C]: ``x[i,t] = H[i,t] / (prod_{k in O+} H[k,t]) ** (1 / d_t)``. Equal weights give exactly 1.

    Args:
        weight: ``[N]`` float64, positive: ``H`` on O+, ``1/H`` on O-.
        peers: the comparison of each token.
        mean: the kind of mean over the peers.
        compared: ``[N]`` bool; other tokens are in no mean and get 1. None: all are compared.
        reduction: all ranks, so that an error is raised on all of them.

    Raises:
        DataError: a geometric share is above ``LARGEST_SHARE``. Collectives: one ``max`` for geometric means.
    """
    weight = significant(weight.log() if mean == "geometric" else weight)
    if compared is not None:
        weight = torch.where(compared, weight, 0.0)
    average = exact_sum(weight, peers.key, peers.count, peers.reduction).mean
    if mean == "geometric":
        share = combine_by_key_(weight, Tensor.sub_, average, peers.key).exp_()
    else:
        share = combine_by_key_(weight, Tensor.div_, average, peers.key)
    if compared is not None:
        share = torch.where(compared, share, 1.0)
    if mean == "geometric":
        _check_bounded(share, reduction)
    return share


def _check_bounded(share: Tensor, reduction: KeyReduction) -> None:
    largest = float(reduction.max(share.amax().view(1) if len(share) else share.new_zeros(1)))
    if largest > LARGEST_SHARE:
        raise DataError(
            f"token_entropy: a share is {largest:.3g}, expected at most 2**100 with entropy_mean='geometric'; set "
            "entropy_clip or a higher entropy_floor, or take entropy_mean='arithmetic'"
        )
