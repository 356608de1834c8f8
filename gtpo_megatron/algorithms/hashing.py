"""Pseudo-random numbers that belong to the data, not to a generator's state: the same for any order and any dealing."""

import torch
from torch import Tensor

_GAMMA = -7046029254386353131  # 0x9E3779B97F4A7C15, SplitMix64's increment, as int64
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def mix(values: Tensor) -> Tensor:
    """SplitMix64's finaliser: int64 ``[...]`` -> int64 ``[...]``, every input bit in every output bit."""
    values = (values ^ _shift(values, 30)) * _MIX_1
    values = (values ^ _shift(values, 27)) * _MIX_2
    return values ^ _shift(values, 31)


def _shift(values: Tensor, bits: int) -> Tensor:
    """Logical shift to the right."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def row_seeds(values: Tensor, response_mask: Tensor, seed: int) -> Tensor:
    """A number for each row made of its content: ``[B, T]`` float -> ``[B]`` int64; padding has no influence."""
    bits = values.to(torch.float32).contiguous().view(torch.int32).to(torch.int64)
    return mix(torch.where(response_mask, bits, 0).sum(1) * _GAMMA + seed)


def token_hashes(seeds: Tensor, width: int) -> Tensor:
    """Independent numbers for each token: ``[B]`` int64 -> ``[B, width]`` int64, non-negative."""
    positions = torch.arange(1, width + 1, device=seeds.device, dtype=torch.int64)
    return mix(seeds[:, None] + positions * _GAMMA) & torch.iinfo(torch.int64).max
