"""The clipped surrogate objective, of tokens (GTPO, GRPO, DAPO, Dr.GRPO) or of whole responses (GRPO-S, GSPO)."""

import torch
from torch import Tensor

from gtpo_megatron.algorithms.losses.loss_batch import LossInputs, SumCount, sum_count
from gtpo_megatron.config.algorithm import AlgorithmConfig, ClipSettings, GRPOSConfig, GSPOConfig, SurrogateSettings


def clipped_surrogate(
    ratio: Tensor,
    advantages: Tensor,
    *,
    clip_eps_low: float,
    clip_eps_high: float,
    dual_clip: float | None = None,
) -> Tensor:
    """``-min(w A, clip(w, 1 - eps_low, 1 + eps_high) A)`` [S 4, 7, 16, 18; I 7, 10].

    With ``dual_clip = c`` the objective is at least ``c A`` if ``A < 0`` (arXiv 1912.09729, Eq. 5).

    Args:
        ratio: importance ratios, any shape; gradient flows.
        advantages: same shape, a constant.
        clip_eps_low: ``eps_low``; 1 leaves the ratio unbounded below.
        clip_eps_high: ``eps_high``.
        dual_clip: ``c > 1`` or None.

    Returns:
        The loss of each element, same shape.
    """
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - clip_eps_low, 1 + clip_eps_high) * advantages)
    if dual_clip is not None:
        objective = torch.where(advantages < 0, torch.maximum(objective, dual_clip * advantages), objective)
    return -objective


def token_surrogate(config: SurrogateSettings, inputs: LossInputs) -> Tensor:
    """``clipped_surrogate`` of every token, ``[B, T]`` [S 4, 16; I 7]."""
    return clipped_surrogate(inputs.ratio, inputs.advantages, **_bounds(config), dual_clip=config.dual_clip)


def response_surrogate(config: GRPOSConfig | GSPOConfig, inputs: LossInputs) -> Tensor:
    """``clipped_surrogate`` of one ratio per response, ``[B]`` [S 7, 18; I 10]; GSPO: arXiv 2507.18071, Eq. 5."""
    ratio = inputs.response_ratio(is_geometric=_is_geometric(config))
    return clipped_surrogate(ratio, inputs.response_advantages, **_bounds(config), dual_clip=config.dual_clip)


def _is_geometric(config: GRPOSConfig | GSPOConfig) -> bool:
    return isinstance(config, GSPOConfig) or config.ratio_mean == "geometric"


def _bounds(config: AlgorithmConfig) -> dict[str, float]:
    if isinstance(config, ClipSettings):
        return {"clip_eps_low": config.clip_eps_low, "clip_eps_high": config.clip_eps_high}
    return {"clip_eps_low": 1.0, "clip_eps_high": torch.inf}


def clip_metrics(config: AlgorithmConfig, inputs: LossInputs) -> dict[str, SumCount]:
    """``clip_statistics`` of the token ratios; without bounds nothing is clipped."""
    return clip_statistics(inputs.ratio, inputs.advantages, inputs.mask, **_bounds(config))


def response_clip_metrics(config: GRPOSConfig | GSPOConfig, inputs: LossInputs) -> dict[str, SumCount]:
    """``clip_statistics`` of the ratios of responses."""
    ratio = inputs.response_ratio(is_geometric=_is_geometric(config))
    return clip_statistics(ratio, inputs.response_advantages, inputs.mask.any(1), **_bounds(config))


def clip_statistics(
    ratio: Tensor, advantages: Tensor, mask: Tensor, *, clip_eps_low: float, clip_eps_high: float
) -> dict[str, SumCount]:
    """How often clipping removes the gradient, and the mean ratio.

    Args:
        ratio: any shape.
        advantages: same shape.
        mask: same shape, bool, the elements that count.
        clip_eps_low: distance from 1 to the lower bound of the ratio.
        clip_eps_high: distance from 1 to the upper bound.

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
