"""Pseudo-random numbers computed from the data, so that they do not depend on order or sharding."""

import torch
from torch import Tensor

_GAMMA = -7046029254386353131  # 0x9E3779B97F4A7C15, SplitMix64's increment, as int64
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def mix(values: Tensor) -> Tensor:
    """SplitMix64's finaliser: int64 ``[...]`` -> int64 ``[...]``, every output bit depends on every input bit."""
    values = (values ^ _shift(values, 30)) * _MIX_1
    values = (values ^ _shift(values, 27)) * _MIX_2
    return values ^ _shift(values, 31)


def _shift(values: Tensor, bits: int) -> Tensor:
    """Logical shift to the right."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def content_seeds(bits: Tensor, key: Tensor, num_keys: int, seed: int) -> Tensor:
    """One seed per key from the values of the key in any order: ``[N]`` integers -> ``[K]`` int64."""
    sums = torch.zeros(num_keys, dtype=torch.int64, device=bits.device).index_add_(0, key, bits.to(torch.int64))
    return mix(sums * _GAMMA + seed)  # integers that overflow wrap around, so the order of terms does not matter


def token_hashes(seeds: Tensor, positions: Tensor) -> Tensor:
    """One pseudo-random number per token from its seed and position: int64 ``[N]`` twice -> ``[N]``, non-negative."""
    return mix(seeds + (positions + 1) * _GAMMA) & torch.iinfo(torch.int64).max
