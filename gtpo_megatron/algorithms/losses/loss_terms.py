"""Results of a loss: sums and weights, not means, so that they can be added over micro-batches and ranks."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SumCount:
    """An additive statistic; its mean is ``total / count`` once both are summed over micro-batches and ranks."""

    total: Tensor
    count: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class LossTerms:
    """The loss of one micro-batch.

    The loss of an update is ``sum(loss_sum) / sum(weight)`` over all micro-batches and data-parallel ranks.

    Attributes:
        loss_sum: scalar with gradient, to be minimised; minus the objective's sum.
        weight: scalar without gradient: this micro-batch's part of the denominator.
        statistics: ``policy/...`` name -> additive statistic, without gradient, float64.
    """

    loss_sum: Tensor
    weight: Tensor
    statistics: dict[str, SumCount]


def sum_count(values: Tensor, mask: Tensor) -> SumCount:
    """Sum and number of the ``values`` where ``mask`` is True; any shape, detached, float64."""
    kept = torch.where(mask, values.detach(), 0.0)
    return SumCount(kept.sum(dtype=torch.float64), mask.sum().to(torch.float64))
