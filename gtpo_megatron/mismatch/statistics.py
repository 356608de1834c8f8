"""Figures of the difference between the trainer's and the sampler's log-probs of the same tokens."""

from fractions import Fraction

import torch
from torch import Tensor

from gtpo_megatron.observability.histogram import Histogram
from gtpo_megatron.observability.metrics import Max, Mean, Metric

PREFIX = "sync/logprob_"
"""Of all figures' names."""

GAP = f"{PREFIX}gap"
"""Name of the histogram of gaps, and beginning of the names of its figures."""

KL = f"{PREFIX}kl_nats"

SCALED = f"{GAP}_scaled"

LEAST_DOUBT = 1e-6
"""Of ``1 - pi`` of a token, below which a log-prob in float32 has no digits left."""


_COARSE_BITS, _FINE_BITS = 20, 60
"""Steps per 1 of the two integers that a value is split into."""

_EXACT_PART = 1 << 13
"""Values whose integers are added in 64 bits; their totals are added as Python's integers."""


def gap_metrics(logprobs: Tensor, rollout_logprobs: Tensor) -> dict[str, Metric]:
    """Figures over tokens; merged over ranks they are those of all tokens, bit for bit.

    With ``d = log pi_trainer - log pi_sampler`` of a sampled token:

    - ``sync/logprob_gap``: histogram of ``|d|``, nats, from which quantiles and shares are read;
    - ``sync/logprob_gap_mean``, ``sync/logprob_gap_max``: of ``|d|``, nats;
    - ``sync/logprob_kl_nats``: mean of ``exp(d) - 1 - d``, the k3 estimate of ``KL(sampler || trainer)``
      (http://joschu.net/blog/kl-approx.html); ``d`` is clamped to +-LOG_RATIO_LIMIT.
    - ``sync/logprob_gap_scaled``: ``sum |d| / sum (1 - pi_trainer)``, nats. An error ``e`` of the logits moves a
      log-prob by about ``(1 - pi) e``: this is the error of the logits, whatever the policy's sharpness.

    Args:
        logprobs: ``[N]`` nats, the trainer's.
        rollout_logprobs: ``[N]`` nats, the sampler's.

    Returns:
        Figures of this rank's tokens. Communication: none.
    """
    from gtpo_megatron.algorithms.losses.loss_batch import LOG_RATIO_LIMIT  # ranks compute, the driver reads names

    difference = logprobs.detach().double() - rollout_logprobs.detach().double()
    gap = difference.abs()
    doubt = -torch.expm1(logprobs.detach().double())
    total = exact_total(gap)
    bounded = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return {
        GAP: Histogram.of(gap),
        f"{GAP}_max": Max(float(gap.max()) if gap.numel() else 0.0),
        f"{GAP}_mean": Mean(total, gap.numel()),
        SCALED: Mean(total, exact_total(doubt.clamp(min=LEAST_DOUBT))),
        KL: Mean(exact_total(torch.expm1(bounded) - bounded), gap.numel()),
    }


def exact_total(values: Tensor) -> Fraction | float:
    """The sum of values, each rounded to a multiple of 2^-60: totals of shards add up to the total of the whole.

    Args:
        values: ``[N]`` float64, magnitudes below ``2 ** 30``.

    Returns:
        The sum; NaN or an infinity as a float if there is one among the values. Communication: none.
    """
    if not bool(torch.isfinite(values).all()):
        return float(values.sum())
    coarse_total = fine_total = 0
    for part in torch.split(values, _EXACT_PART):
        coarse = (part * 2.0**_COARSE_BITS).round()
        coarse_total += int(coarse.long().sum())
        fine_total += int(((part - coarse / 2.0**_COARSE_BITS) * 2.0**_FINE_BITS).round().long().sum())
    return Fraction(coarse_total, 1 << _COARSE_BITS) + Fraction(fine_total, 1 << _FINE_BITS)
