"""Importance ratios between the current and the old policy."""

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Bound of log ratios before exp; beyond it the loss is large and finite, without gradient."""


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
        is_geometric: which mean.

    Returns:
        ``[B]``; 1 for rows without tokens.
    """
    lengths = response_mask.sum(1)
    count = lengths.clamp(min=1)
    if is_geometric:
        return torch.exp(log_ratios.sum(1) / count)
    mean = torch.where(response_mask, torch.exp(log_ratios), 0.0).sum(1) / count
    return torch.where(lengths > 0, mean, torch.ones_like(mean))
