"""CISPO: truncated importance weights on the policy gradient itself (MiniMax-M1, arXiv 2506.13585)."""

import torch
from torch import Tensor


def cispo_loss(
    logprobs: Tensor, log_ratios: Tensor, advantages: Tensor, *, clip_eps_low: float, clip_eps_high: float
) -> Tensor:
    """``-sg(clip(w, 1 - eps_low, 1 + eps_high)) A log pi`` (arXiv 2506.13585, Eq. 4-5).

    Args:
        logprobs: ``[B, T]`` nats, finite; gradient flows.
        log_ratios: ``[B, T]``.
        advantages: ``[B, T]``.
        clip_eps_low: 1 leaves the weight unbounded below.
        clip_eps_high: ``eps_high``.

    Returns:
        ``[B, T]``, the loss of each token.
    """
    weight = torch.exp(log_ratios.detach()).clamp(1 - clip_eps_low, 1 + clip_eps_high)
    return -weight * advantages * logprobs
