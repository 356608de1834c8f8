"""Frequencies of the rotary embedding, as Hugging Face computes them.

Megatron's own stretching has the same formula but fixes three of its four parameters, so the frequencies are computed
here, for every kind alike, and handed to its rotary embedding.
"""

import math
from typing import Any

import torch
from torch import Tensor

from gtpo_megatron.weights.architecture import Architecture, RopeScaling


def inverse_frequencies(arch: Architecture) -> Tensor:
    """Radians a position, of every pair of channels: ``theta^(-2 i / head_size)``, stretched where the model is.

    Returns:
        ``[head_size / 2]`` float32.
    """
    exponents = torch.arange(0, arch.head_size, 2, dtype=torch.float32) / arch.head_size
    frequencies = 1.0 / (arch.rope_theta**exponents)
    scaling = arch.rope_scaling
    if scaling is None:
        return frequencies
    return frequencies / scaling.factor if scaling.kind == "linear" else _llama3(frequencies, scaling)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1: with ``t`` the turns over the original context, ``low`` and ``high`` the limits and ``k`` the factor,

    ``f / k`` where ``t < low``, ``f`` where ``t > high``, else ``(1 - s) f / k + s f`` with
    ``s = (t - low) / (high - low)``.
    """
    turns = scaling.original_positions / (2 * math.pi / frequencies)
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    slow = frequencies / scaling.factor
    between = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    return torch.where(
        turns < scaling.low_freq_factor, slow, torch.where(turns > scaling.high_freq_factor, frequencies, between)
    )


def set_frequencies(policy: Any, arch: Architecture) -> None:
    """Gives a Megatron ``GPTModel`` the model's frequencies; every pipeline stage has a rotary embedding of its own."""
    rotary = policy.rotary_pos_emb
    rotary.inv_freq = inverse_frequencies(arch).to(rotary.inv_freq.device)
