"""Entropy as a bonus on the advantage (arXiv 2506.14758)."""

import torch
from torch import Tensor

from gtpo_megatron.algorithms.rows import row_blocks


def add_entropy_bonus(
    advantages: Tensor, token_entropy: Tensor, response_mask: Tensor, *, coefficient: float, bound: float
) -> None:
    """``A <- A + min(coefficient * H, |A| / bound)`` in place (arXiv 2506.14758, Eq. 6-7).

    Args:
        advantages: ``[B, T]`` float32.
        token_entropy: ``[B, T]`` nats; a constant: no gradient flows.
        response_mask: ``[B, T]`` bool.
        coefficient: ``alpha`` there.
        bound: ``kappa`` there; above 1 no sign can flip.
    """
    for first, last in row_blocks(advantages):
        block = advantages[first:last]
        entropy = torch.where(response_mask[first:last], token_entropy[first:last].detach(), 0.0).clamp_(min=0.0)
        block += torch.minimum(coefficient * entropy, block.abs() / bound).to(block.dtype)
