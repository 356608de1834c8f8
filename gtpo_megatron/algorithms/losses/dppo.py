"""DPPO: a trust region of divergence instead of ratio, around the sampler's policy (arXiv 2602.04879)."""

import torch
from torch import Tensor

from gtpo_megatron.algorithms.losses.loss_batch import LossInputs, SumCount, log_ratio, sum_count
from gtpo_megatron.config.algorithm import DPPOConfig


def dppo_loss(config: DPPOConfig, inputs: LossInputs) -> Tensor:
    """``-sg(min(r, max_ratio) M) A log pi`` of every token, ``[B, T]``: the gradient of ``-M r A`` (Eq. 11).

    ``r = pi / mu``, ``mu`` being the sampler's policy. ``M = 0`` for ``blocked`` tokens (Eq. 12).
    """
    weight = _sampler_ratio(inputs).clamp(max=config.max_ratio) * ~blocked(config, inputs)
    return -weight * inputs.advantages * inputs.logprobs


def blocked(config: DPPOConfig, inputs: LossInputs) -> Tensor:
    """Tokens too far from the sampler's policy that the gradient would move further, ``[B, T]`` bool (Eq. 12)."""
    assert inputs.rollout_logprobs is not None
    current, sampled = inputs.logprobs.detach().to(torch.float64), inputs.rollout_logprobs.to(torch.float64)
    is_away = torch.where(inputs.advantages > 0, current > sampled, (inputs.advantages < 0) & (current < sampled))
    if config.divergence == "tv":
        return is_away & (binary_tv(current, sampled) > config.max_tv)
    return is_away & (binary_kl(current, sampled) > config.max_kl)


def binary_tv(logprobs: Tensor, sampled: Tensor) -> Tensor:
    """``|mu - pi|`` (Eq. 13).

    Args:
        logprobs: log ``pi``, nats, float64.
        sampled: log ``mu``, same shape.
    """
    return (sampled.exp() - logprobs.exp()).abs()


def binary_kl(logprobs: Tensor, sampled: Tensor) -> Tensor:
    """``mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi))`` (Eq. 14), with ``0 log 0 = 0``; infinite at ``pi = 1``.

    The authors' code adds 1e-8 inside the second logarithm instead.
    """
    others, others_sampled = (-torch.expm1(one.clamp(max=0.0)) for one in (logprobs, sampled))
    return (
        sampled.exp() * (sampled - logprobs)
        + torch.xlogy(others_sampled, others_sampled)
        - torch.xlogy(others_sampled, others)
    )


def dppo_metrics(config: DPPOConfig, inputs: LossInputs) -> dict[str, SumCount]:
    """``policy/clip_frac``: blocked tokens, ``_low`` with ``A < 0``, ``_high`` with ``A > 0``; ``policy/ratio_mean``.

    The ratio is that to the sampler's policy.
    """
    is_blocked, mask = blocked(config, inputs).to(torch.float64), inputs.mask
    return {
        "policy/clip_frac": sum_count(is_blocked, mask),
        "policy/clip_frac_low": sum_count(is_blocked * (inputs.advantages < 0), mask),
        "policy/clip_frac_high": sum_count(is_blocked * (inputs.advantages > 0), mask),
        "policy/ratio_mean": sum_count(_sampler_ratio(inputs), mask),
    }


def _sampler_ratio(inputs: LossInputs) -> Tensor:
    """``pi / mu``, a constant; 1 outside the mask."""
    assert inputs.rollout_logprobs is not None
    return log_ratio(inputs.logprobs.detach(), inputs.rollout_logprobs, inputs.mask).exp()
