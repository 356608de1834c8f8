"""FIPO: advantages weighed by the log ratios of the tokens that follow (arXiv 2603.19835)."""

from dataclasses import replace

import torch
from torch import Tensor

from gtpo_megatron.algorithms.losses.clipped_surrogate import clip_metrics, token_surrogate
from gtpo_megatron.algorithms.losses.loss_batch import LossInputs, SumCount, sum_count
from gtpo_megatron.config.algorithm import FIPOConfig


def fipo_loss(config: FIPOConfig, inputs: LossInputs) -> Tensor:
    """``clipped_surrogate`` of every token with ``f A`` in the place of ``A``, ``[B, T]`` (Eq. 8)."""
    weighed = inputs.advantages * influence(config, inputs).to(inputs.advantages.dtype)
    return token_surrogate(config, replace(inputs, advantages=weighed))


def influence(config: FIPOConfig, inputs: LossInputs) -> Tensor:
    """``f = clip(exp(F), 1 - eps_low, 1 + eps_high)``, a constant, ``[B, T]`` float64 (Eq. 6-7).

    ``F_t = sum_{k >= t} M_k gamma^(k - t) log w_k`` over the response, ``gamma = 2^(-1 / half_life_tokens)``. ``M_k``
    is 0 if the dual clip removes the gradient: ``A < 0`` and ``w > dual_clip`` (Eq. 5). ``f`` is 1 if ``A < 0`` and
    ``w > safety_ratio``.
    """
    ratio, is_negative = inputs.ratio.detach(), inputs.advantages < 0
    log_ratios = inputs.log_ratios.detach().to(torch.float64)
    if config.dual_clip is not None:
        log_ratios = torch.where(is_negative & (ratio > config.dual_clip), 0.0, log_ratios)
    future = discounted_future(log_ratios, inputs.mask, 2.0 ** (-1.0 / config.half_life_tokens))
    weight = future.exp().clamp(1 - config.influence_eps_low, 1 + config.influence_eps_high)
    return torch.where(is_negative & (ratio > config.safety_ratio), 1.0, weight)


def discounted_future(values: Tensor, mask: Tensor, discount: float) -> Tensor:
    """``sum_{k >= t} discount^(k - t) v_k`` over the tokens of the mask, ``[B, T]`` float64; 0 elsewhere.

    The distance ``k - t`` counts only the policy's own tokens (the authors' code counts all).
    Doubles the summed range ``log2(T)`` times instead of looping over tokens.
    """
    own_first = torch.argsort((~mask).to(torch.uint8), dim=1, stable=True)
    total = torch.where(mask, values, 0.0).to(torch.float64).gather(1, own_first)
    reach, num_columns = 1, total.shape[1]
    while reach < num_columns:
        ahead = torch.zeros_like(total)
        ahead[:, : num_columns - reach] = total[:, reach:]
        total = total + discount**reach * ahead
        reach *= 2
    return torch.where(mask, torch.zeros_like(total).scatter_(1, own_first, total), 0.0)


def fipo_metrics(config: FIPOConfig, inputs: LossInputs) -> dict[str, SumCount]:
    """``clip_metrics`` and ``policy/influence_mean``, the mean weight."""
    return clip_metrics(config, inputs) | {"policy/influence_mean": sum_count(influence(config, inputs), inputs.mask)}
