"""The tensors of a loss: of a mini-batch, of some of its rows with their ratios, and the sums that it returns.

Sums and parts of the denominator, not means, so that they can be added over micro-batches and ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Bound of log ratios before exp; beyond it the loss is large and finite, without gradient."""


@dataclass(frozen=True, slots=True)
class SumCount:
    """An additive statistic; its mean is ``total / count`` once both are summed over micro-batches and ranks."""

    total: Tensor
    count: Tensor


def sum_count(values: Tensor, mask: Tensor) -> SumCount:
    """Sum and number of the ``values`` where ``mask`` is True; any shape, detached, float64."""
    kept = torch.where(mask, values.detach(), 0.0)
    return SumCount(kept.sum(dtype=torch.float64), mask.sum().to(torch.float64))


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateBatch:
    """This rank's rows of a mini-batch, with what depends on all of its rows; everything but the current log-probs.

    Attributes:
        old_logprobs: ``[B, T]`` nats, of the policy before the first update of the batch.
        advantages: ``[B, T]`` float32.
        response_mask: ``[B, T]`` bool, the policy's own tokens that enter the loss, in any arrangement.
        row_weights: ``[B]`` float64, see ``Denominator``.
        token_weights: ``[B, T]``, factors of each token's loss that do not change the denominator (the off-policy
            correction); None: all 1.
        token_selection: ``[B, T]`` bool, tokens chosen over the batch; None if the algorithm chooses none.
        rollout_logprobs: ``[B, T]`` nats, the sampler's; None if the algorithm does not need them.
        ref_logprobs: ``[B, T]`` nats, the reference policy's; None if the loss has no term of it.
        denominator: scalar float64, of the whole mini-batch over all ranks.
        statistics: off-policy statistics of this rank's rows of it, additive over ranks; empty without
            ``rollout_logprobs``.
    """

    old_logprobs: Tensor
    advantages: Tensor
    response_mask: Tensor
    row_weights: Tensor
    token_weights: Tensor | None = None
    token_selection: Tensor | None = None
    rollout_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    denominator: Tensor
    statistics: dict[str, SumCount]

    def to(self, device: torch.device) -> "UpdateBatch":
        """Moves all tensors but the statistics to another device."""
        changes: dict[str, Any] = {}
        for one in fields(self):
            if isinstance(tensor := getattr(self, one.name), Tensor):
                changes[one.name] = tensor.to(device)
        return replace(self, **changes)

    def select(self, rows: Sequence[int] | Tensor, width: int | None = None) -> "UpdateBatch":
        """Some rows, cut to ``width`` tokens (None: all); denominator and statistics stay the mini-batch's."""
        picked = torch.as_tensor(rows, dtype=torch.int64).to(self.advantages.device, non_blocking=True)
        changes: dict[str, Any] = {"row_weights": self.row_weights[picked]}
        for one in fields(self):
            matrix = getattr(self, one.name)
            if isinstance(matrix, Tensor) and matrix.ndim == 2:
                changes[one.name] = matrix[picked, :width]
        return replace(self, **changes)


@dataclass(frozen=True, kw_only=True, slots=True)
class LossInputs:
    """Some rows of a batch, ``[B, T]``; values outside ``mask`` are 0.

    Attributes:
        logprobs: nats, of the current policy; gradient flows.
        old_logprobs: nats, of the policy before the first update of the batch.
        log_ratios: ``log pi - log pi_old``, bounded; gradient flows.
        advantages: constants.
        mask: bool, the policy's own tokens that enter the loss, in any arrangement.
        selection: bool, the tokens that the algorithm's ``select`` chose; None if it has no ``select``.
        rollout_logprobs: nats, of the sampler; None if the algorithm does not need them.
        ref_logprobs: nats, of the reference policy; None if the loss has no term of it.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    log_ratios: Tensor
    advantages: Tensor
    mask: Tensor
    selection: Tensor | None = None
    rollout_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None

    @property
    def ratio(self) -> Tensor:
        """``w[i,t] = pi / pi_old``; 1 outside the mask."""
        return torch.exp(self.log_ratios)

    @property
    def response_advantages(self) -> Tensor:
        """``[B]``: the advantage of each response's first token; 0 for a response without tokens."""
        return first_of_response(self.advantages, self.mask)

    def response_ratio(self, *, is_geometric: bool) -> Tensor:
        """``ws[i]`` ``[B]``; see ``sequence_ratio``."""
        return sequence_ratio(self.log_ratios, self.mask, is_geometric=is_geometric)


def log_ratio(logprobs: Tensor, old_logprobs: Tensor, response_mask: Tensor) -> Tensor:
    """``log pi(o_t) - log pi_old(o_t)``, 0 outside the mask; masked before any exp, since ``0 * inf`` is NaN.

    Args:
        logprobs: ``[B, T]`` nats; gradient flows.
        old_logprobs: ``[B, T]`` nats.
        response_mask: ``[B, T]`` bool.

    Returns:
        ``[B, T]`` within +-LOG_RATIO_LIMIT.
    """
    difference = torch.where(response_mask, logprobs - old_logprobs.detach(), 0.0)
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def sequence_ratio(log_ratios: Tensor, response_mask: Tensor, *, is_geometric: bool) -> Tensor:
    """One ratio per response: ``ws = (1/|o|) sum_t w_t`` [S 6; I 11], or GSPO's ``(prod_t w_t)^(1/|o|)``.

    Gradient: ``(1/|o|) sum_t w_t dlogpi_t``, respectively ``ws (1/|o|) sum_t dlogpi_t`` ([S 28] is misprinted).

    Args:
        log_ratios: ``[B, T]``, 0 outside the mask.
        response_mask: ``[B, T]`` bool.
        is_geometric: geometric mean of the token ratios, in place of the arithmetic one.

    Returns:
        ``[B]``; 1 for rows without tokens.
    """
    lengths = response_mask.sum(1)
    count = lengths.clamp(min=1)
    if is_geometric:
        return torch.exp(log_ratios.sum(1) / count)
    mean = torch.where(response_mask, torch.exp(log_ratios), 0.0).sum(1) / count
    return torch.where(lengths > 0, mean, torch.ones_like(mean))


def first_of_response(values: Tensor, mask: Tensor) -> Tensor:
    """The value of each row's first token in the mask, ``[B, T]`` -> ``[B]``; 0 for a row without any."""
    if not mask.shape[1]:
        return values.new_zeros(len(values))
    first = mask.to(torch.uint8).argmax(1, keepdim=True)
    return torch.where(mask.gather(1, first), values.gather(1, first), 0.0)[:, 0]


@dataclass(frozen=True, kw_only=True, slots=True)
class LossTerms:
    """The loss of one micro-batch.

    The loss of an update is the sum of ``loss_sum`` over all micro-batches and data-parallel ranks, divided by
    ``UpdateBatch.denominator``.

    Attributes:
        loss_sum: scalar with gradient, to be minimised; minus the objective's sum.
        weight: scalar without gradient, this micro-batch's part of the denominator.
        statistics: ``policy/...`` name -> additive statistic, without gradient, float64.
    """

    loss_sum: Tensor
    weight: Tensor
    statistics: dict[str, SumCount]
