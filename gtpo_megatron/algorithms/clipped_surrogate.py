"""The clipped surrogate objective, of tokens (GTPO, GRPO, DAPO, Dr.GRPO) or of whole responses (GRPO-S, GSPO)."""

import torch
from torch import Tensor

from gtpo_megatron.algorithms.loss_terms import SumCount, sum_count


def clipped_surrogate(
    ratio: Tensor,
    advantages: Tensor,
    *,
    clip_eps_low: float,
    clip_eps_high: float,
    dual_clip: float | None = None,
) -> Tensor:
    """``-min(w A, clip(w, 1 - eps_low, 1 + eps_high) A)`` [S 4, 7, 16, 18; I 7, 10].

    With ``dual_clip = c``: where ``A < 0`` the objective is at least ``c A`` (arXiv 1912.09729, Eq. 5).

    Args:
        ratio: importance ratios, any shape; gradient flows.
        advantages: same shape, a constant.
        clip_eps_low: 1 leaves the ratio unbounded below.
        clip_eps_high: ``eps_high``.
        dual_clip: ``c > 1`` or None.

    Returns:
        The loss of each element, same shape.
    """
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - clip_eps_low, 1 + clip_eps_high) * advantages)
    if dual_clip is not None:
        objective = torch.where(advantages < 0, torch.maximum(objective, dual_clip * advantages), objective)
    return -objective


def clip_statistics(
    ratio: Tensor, advantages: Tensor, mask: Tensor, *, clip_eps_low: float, clip_eps_high: float
) -> dict[str, SumCount]:
    """How often the clip takes the gradient away, and the ratios themselves.

    Args:
        ratio: any shape.
        advantages: same shape.
        mask: same shape, bool, the elements that count.
        clip_eps_low: see ``clipped_surrogate``.
        clip_eps_high: see ``clipped_surrogate``.

    Returns:
        ``policy/clip_frac`` and its parts ``_low`` (``A < 0``, ratio too small) and ``_high``, ``policy/ratio_mean``.
    """
    ratio = ratio.detach()
    is_low = (ratio < 1 - clip_eps_low) & (advantages < 0)
    is_high = (ratio > 1 + clip_eps_high) & (advantages > 0)
    return {
        "policy/clip_frac": sum_count((is_low | is_high).to(ratio.dtype), mask),
        "policy/clip_frac_low": sum_count(is_low.to(ratio.dtype), mask),
        "policy/clip_frac_high": sum_count(is_high.to(ratio.dtype), mask),
        "policy/ratio_mean": sum_count(ratio, mask),
    }
