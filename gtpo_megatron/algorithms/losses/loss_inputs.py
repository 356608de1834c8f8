"""Inputs of a loss function."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gtpo_megatron.algorithms.losses.ratios import sequence_ratio


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
