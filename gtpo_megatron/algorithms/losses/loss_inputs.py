"""Inputs of a loss: those of a whole mini-batch, and what a loss function is given of some of its rows."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from gtpo_megatron.algorithms.losses.loss_terms import SumCount
from gtpo_megatron.algorithms.losses.ratios import sequence_ratio


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateBatch:
    """This rank's rows of a mini-batch, with what depends on all of its rows; everything but the current log-probs.

    Attributes:
        old_logprobs: ``[B, T]`` nats, of the policy before the first update of the batch.
        advantages: ``[B, T]`` float32.
        response_mask: ``[B, T]`` bool, the policy's own tokens that enter the loss, in any arrangement.
        row_weights: ``[B]`` float64, see ``denominators``.
        token_weights: ``[B, T]``, factors of each token's loss that do not change the denominator (the off-policy
            correction); None: all 1.
        token_selection: ``[B, T]`` bool, tokens chosen over the batch; None if the algorithm chooses none.
        rollout_logprobs: ``[B, T]`` nats, the sampler's; None if the algorithm does not need them.
        ref_logprobs: ``[B, T]`` nats, the reference policy's; None if the loss has no term of it.
        weight: scalar float64, the denominator of the whole mini-batch, over all ranks.
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
    weight: Tensor
    statistics: dict[str, SumCount]

    def to(self, device: torch.device) -> "UpdateBatch":
        """Moves all tensors but the statistics to another device."""
        changes: dict[str, Any] = {}
        for one in fields(self):
            if isinstance(tensor := getattr(self, one.name), Tensor):
                changes[one.name] = tensor.to(device)
        return replace(self, **changes)

    def rows(self, index: Sequence[int] | Tensor, width: int | None = None) -> "UpdateBatch":
        """The rows ``index``, cut to ``width`` tokens (None: all); weight and statistics stay the mini-batch's."""
        picked = torch.as_tensor(index, dtype=torch.int64).to(self.advantages.device, non_blocking=True)
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
        """``ws[i]`` ``[B]``; see ``ratios.sequence_ratio``."""
        return sequence_ratio(self.log_ratios, self.mask, is_geometric=is_geometric)


def first_of_response(values: Tensor, mask: Tensor) -> Tensor:
    """The value of each row's first token in the mask, ``[B, T]`` -> ``[B]``; 0 for a row without any."""
    if not mask.shape[1]:
        return values.new_zeros(len(values))
    first = mask.to(torch.uint8).argmax(1, keepdim=True)
    return torch.where(mask.gather(1, first), values.gather(1, first), 0.0)[:, 0]
