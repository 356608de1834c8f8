"""Frequencies of the rotary embedding, as Hugging Face computes them.

Megatron has some of these formulas, with parameters of its own that it fixes in part. So the frequencies are computed
here, for every kind alike, and handed to its rotary embedding.
"""

import copy
import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gtpo_megatron.weights.architecture import Architecture
from gtpo_megatron.weights.rope import RopeScaling


def inverse_frequencies(arch: Architecture) -> Tensor:
    """Radians per position, of every rotated pair of elements: ``theta^(-2 i / rotary_size)``, stretched if so scaled.

    Returns:
        ``[rotary_size / 2]`` float32.
    """
    exponents = torch.arange(0, arch.rotary_size, 2, dtype=torch.float32) / arch.rotary_size
    powers = arch.rope_theta**exponents
    scaling = arch.rope_scaling
    if scaling is None:
        return 1.0 / powers
    match scaling.kind:
        case "linear":
            return 1.0 / powers / scaling.factor
        case "llama3":
            return _llama3(1.0 / powers, scaling)
        case "yarn":
            return _yarn(powers, scaling, arch)
        case "longrope":
            return 1.0 / (torch.tensor(scaling.long_factors if scaling.is_long else scaling.factors) * powers)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1: with ``t`` the turns over the original context, ``low`` and ``high`` the limits and ``k`` the factor,

    ``f / k`` if ``t < low``, ``f`` if ``t > high``, else ``(1 - s) f / k + s f`` with
    ``s = (t - low) / (high - low)``.
    """
    turns = scaling.original_positions / (2 * math.pi / frequencies)
    smooth = (turns - scaling.slow_turns) / (scaling.fast_turns - scaling.slow_turns)
    slow = frequencies / scaling.factor
    between = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    return torch.where(turns < scaling.slow_turns, slow, torch.where(turns > scaling.fast_turns, frequencies, between))


def _yarn(powers: Tensor, scaling: RopeScaling, arch: Architecture) -> Tensor:
    """YaRN (arXiv 2309.00071, Eq. 17-18): ``s f + (1 - s) f / k``, ``s`` falling from 1 to 0 along the pairs.

    It falls linearly in the number of the pair, between the pairs that make ``fast_turns`` and ``slow_turns`` turns
    over the original context; the paper's ramp is linear in the turns.
    """

    def pair_of(turns: float) -> float:
        positions = scaling.original_positions / (turns * 2 * math.pi)
        return arch.rotary_size * math.log(positions) / (2 * math.log(arch.rope_theta))

    first, last = pair_of(scaling.fast_turns), pair_of(scaling.slow_turns)
    if scaling.rounds_range:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, arch.rotary_size - 1)
    width = last - first or 0.001  # a step where both are one pair
    stays = 1 - ((torch.arange(len(powers), dtype=torch.float32) - first) / width).clamp(0, 1)
    return 1.0 / (scaling.factor * powers) * (1 - stays) + 1.0 / powers * stays


def attention_factor(arch: Architecture) -> float:
    """Factor on queries and keys where they are rotated."""
    return 1.0 if arch.rope_scaling is None else arch.rope_scaling.attention_factor


def score_factor(arch: Architecture) -> float:
    """Factor on the scores of multi-latent attention, which the stretching asks for besides."""
    return 1.0 if arch.rope_scaling is None else arch.rope_scaling.score_factor


def set_attention_factor(config: Any, arch: Architecture) -> None:
    """Tells Megatron's attention the factor, by the attributes in which it looks for its own YaRN's.

    It takes ``(0.1 a ln(s) + 1) / (0.1 b ln(s) + 1)`` for a scale ``s``, ``a`` and ``b``. Its fused rotary embedding
    of packed sequences leaves the factor out without a word, so it must be off.

    Args:
        config: Megatron's configuration of the model, before the model is built.
        arch: architecture of the model.
    """
    factor = attention_factor(arch)
    if factor != 1.0:
        config.yarn_rotary_scaling_factor, config.yarn_mscale, config.yarn_mscale_all_dim = (
            math.e,
            10 * (factor - 1),
            0.0,
        )


def unset_attention_factor(config: Any) -> None:
    """Takes it back, of a layer's own copy of the configuration: its rotary embedding is not stretched."""
    for name in ("yarn_rotary_scaling_factor", "yarn_mscale", "yarn_mscale_all_dim"):
        if hasattr(config, name):
            delattr(config, name)


def is_local(arch: Architecture, layer: int) -> bool:
    """Whether a layer, counted from 0, has the model's other rotary embedding."""
    return arch.local_rope is not None and arch.local_rope.layers[layer]


def with_local_angles(angles: Tensor, local: Any) -> Tensor:
    """The angles of both rotary embeddings, for layers that take one of them.

    Args:
        angles: ``[S, 1, 1, rotary_size]`` by position.
        local: the other embedding, which ``set_frequencies`` made.

    Returns:
        ``[S, 1, 2, rotary_size]``.
    """
    return torch.cat([angles, local(len(angles), packed_seq=True)], dim=2)


def packed_angles(angles: Tensor, bounds: Sequence[int], starts: Sequence[int]) -> Tensor:
    """Angles of every token of packed sequences.

    Megatron takes angles to be of packed tokens where there are as many of both.

    Args:
        angles: ``[at least the longest sequence, 1, 1 or 2, rotary_size]``, by position.
        bounds: where sequences start behind their prefixes, and at last the number of tokens ``P``.
        starts: position of each one's first token behind its prefix.

    Returns:
        ``[P, 1, 1 or 2, rotary_size]``.
    """
    lengths = [end - start for start, end in itertools.pairwise(bounds)]
    return torch.cat([angles[start : start + length] for start, length in zip(starts, lengths, strict=True)])


def set_frequencies(policy: Any, arch: Architecture) -> None:
    """Gives a Megatron ``GPTModel`` the model's frequencies; every pipeline stage has a rotary embedding of its own.

    If layers have another one, the model's attribute ``local_rotary`` is that; else it is None.
    """
    rotary = policy.rotary_pos_emb
    rotary.inv_freq = inverse_frequencies(arch).to(rotary.inv_freq.device)
    local = None
    if arch.local_rope is not None:
        local = copy.copy(rotary)
        unstretched = dataclasses.replace(arch, rope_theta=arch.local_rope.theta, rope_scaling=None)
        local.inv_freq = inverse_frequencies(unstretched).to(rotary.inv_freq.device)
    policy.local_rotary = local
