"""Importance correction from the sampler's policy to the trainer's old policy, and its statistics."""

from typing import Literal

import torch
from torch import Tensor

from gtpo_megatron.algorithms.losses.loss_batch import LOG_RATIO_LIMIT, SumCount, sum_count


def correction_ratio(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    response_mask: Tensor,
    level: Literal["token", "sequence", "geometric"],
) -> Tensor:
    """``c = pi_old / pi_rollout`` of tokens, or the product or geometric mean over each response.

    Args:
        old_logprobs: ``[B, T]`` nats, by the trainer.
        rollout_logprobs: ``[B, T]`` nats, by the sampler.
        response_mask: ``[B, T]`` bool.
        level: ``sequence`` and ``geometric`` repeat one value over the response.

    Returns:
        ``[B, T]`` float, 1 outside the mask; logs are clamped to +-LOG_RATIO_LIMIT.
    """
    gap = torch.where(response_mask, old_logprobs.detach() - rollout_logprobs.detach(), 0.0)
    if level != "token":
        gap = gap.sum(1, keepdim=True)
        if level == "geometric":
            gap = gap / response_mask.sum(1, keepdim=True).clamp(min=1)
        gap = torch.where(response_mask, gap, 0.0)
    return gap.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def correction_weights(ratio: Tensor, *, masks: bool, lower: float, upper: float) -> Tensor:
    """Truncated (``clip(c, lower, upper)``) or masked (``c`` inside the interval, 0 outside) importance weights."""
    if masks:
        return torch.where((ratio >= lower) & (ratio <= upper), ratio, 0.0)
    return ratio.clamp(lower, upper)


def vetoed(old_logprobs: Tensor, rollout_logprobs: Tensor, response_mask: Tensor, veto_nats: float) -> Tensor:
    """``max_t |log pi_old(o_t) - log pi_rollout(o_t)| > veto_nats`` of each response.

    One token that the trainer finds (nearly) impossible says that the sampler wrote the rest under another policy; a
    truncated factor for that token alone would keep the rest.

    Args:
        old_logprobs: ``[B, T]`` nats, by the trainer.
        rollout_logprobs: ``[B, T]`` nats, by the sampler.
        response_mask: ``[B, T]`` bool.
        veto_nats: largest gap allowed.

    Returns:
        ``[B]`` bool.
    """
    gap = torch.where(response_mask, old_logprobs.detach() - rollout_logprobs.detach(), 0.0)
    return (gap.abs() > veto_nats).any(1)


def correction_statistics(
    ratio: Tensor,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    response_mask: Tensor,
    *,
    lower: float,
    upper: float,
) -> dict[str, SumCount]:
    """How far the sampler's policy is from the trainer's, over response tokens.

    - ``off_policy/ratio_mean``, ``off_policy/ratio_square_mean``: moments of ``c``; both 1 on policy.
    - ``off_policy/outside_frac``: tokens with ``c`` outside [lower, upper].
    - ``off_policy/logprob_gap_mean``: ``|log pi_old - log pi_rollout|``, nats.
    - ``off_policy/kl_nats``: ``KL(rollout || old)``, estimated by ``u - 1 - log u``, ``u = pi_old / pi_rollout``.
    """
    gap = torch.where(response_mask, old_logprobs.detach() - rollout_logprobs.detach(), 0.0)
    bounded = gap.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    is_outside = (ratio < lower) | (ratio > upper)
    return {
        "off_policy/ratio_mean": sum_count(ratio, response_mask),
        "off_policy/ratio_square_mean": sum_count(ratio.square(), response_mask),
        "off_policy/outside_frac": sum_count(is_outside.to(ratio.dtype), response_mask),
        "off_policy/logprob_gap_mean": sum_count(gap.abs(), response_mask),
        "off_policy/kl_nats": sum_count(torch.expm1(bounded) - bounded, response_mask),
    }
