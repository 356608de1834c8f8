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


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchTerms:
    """Batch-wide inputs of a loss, for the rows of one micro-batch; see ``prepare_update``.

    Attributes:
        row_weights: ``[B]`` float64, see ``denominators``.
        token_weights: ``[B, T]`` float, factors of each token's loss that do not change the denominator (the off-policy
            correction); None: all 1.
        token_selection: ``[B, T]`` bool, tokens chosen over the batch; None if the algorithm chooses none.
        rollout_logprobs: ``[B, T]`` nats, by the sampler; None if the algorithm does not need them.
        ref_logprobs: ``[B, T]`` nats, by the reference policy; None if the loss has no term of it.
    """

    row_weights: Tensor
    token_weights: Tensor | None = None
    token_selection: Tensor | None = None
    rollout_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None


def sum_count(values: Tensor, mask: Tensor) -> SumCount:
    """Sum and number of the ``values`` where ``mask`` is True; any shape, detached, float64."""
    kept = torch.where(mask, values.detach(), 0.0)
    return SumCount(kept.sum(dtype=torch.float64), mask.sum().to(torch.float64))
