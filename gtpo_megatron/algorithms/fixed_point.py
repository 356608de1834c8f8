"""Sums that do not depend on the order of their terms, because they are made of integers.

A floating-point sum changes in its last bits with the order of its terms, hence with how responses were dealt to ranks.
Here every term is first rounded to a grid fixed by facts that all ranks share (a bound of the terms and their number);
sums of grid points are exact, so any order, any number of ranks and atomics on a GPU give the same bits.
"""

import torch
from torch import Tensor

INTEGER_BITS = 62
"""Bits of magnitude that a sum may take: an int64 less its sign and one bit of room."""

LIMB_BITS = 31
"""A row's int64 sum is cut in two limbs before rows are summed, so that 2**31 rows fit."""

_FLOAT64_BIAS = 1023
_FLOAT64_FRACTION_BITS = 52


def power_of_two(exponent: Tensor) -> Tensor:
    """``2 ** exponent`` exactly, assembled from bits (``torch.ldexp`` goes through ``pow``).

    Args:
        exponent: integers in [-1022, 1023]; others are clamped.

    Returns:
        float64, same shape.
    """
    biased = exponent.to(torch.int64).clamp(-1022, 1023) + _FLOAT64_BIAS
    return (biased << _FLOAT64_FRACTION_BITS).view(torch.float64)


def grid_scale(bound: Tensor, bits: int = INTEGER_BITS) -> Tensor:
    """The largest power of two ``s`` with ``bound * s < 2 ** bits``; 1 where ``bound`` is 0.

    Args:
        bound: float64, non-negative: what the magnitude of a whole sum cannot exceed.
        bits: room for the scaled sum.

    Returns:
        float64, same shape. Multiplying by it is exact.
    """
    _, exponent = torch.frexp(bound)
    return torch.where(bound > 0, power_of_two(bits - exponent), 1.0)


def grid_unit(bound: Tensor, num_terms: int) -> Tensor:
    """The step of a grid on which ``num_terms`` values of magnitude up to ``bound`` are added by ``integer_sums``.

    Args:
        bound: float64, non-negative.
        num_terms: of the longest sum.

    Returns:
        Powers of two, same shape: ``2 ** -50`` of the bound, or ``2 ** -(61 - log2 num_terms)`` if that is larger.
    """
    _, exponent = torch.frexp(bound)
    return power_of_two(exponent - min(_FLOAT64_FRACTION_BITS - 1, INTEGER_BITS - max(1, num_terms).bit_length()))


def integer_sums(values: Tensor, unit: Tensor, dim: int, *, out: Tensor) -> Tensor:
    """``sum(round(values / unit))`` over a dimension, exactly, hence in any order.

    Adding ``1.5 * 2 ** 52`` units rounds a float64 to a whole number of them and leaves that number in its low bits,
    so that sums of the bits, as integers, are sums of the numbers: much faster than a conversion.

    Args:
        values: float64, of magnitude up to ``2 ** 51`` units.
        unit: powers of two, of the shape of ``values`` with 1 in the place of ``dim``.
        dim: to sum over.
        out: of the shape of ``values``, overwritten; may be ``values``.

    Returns:
        int64, without ``dim``.
    """
    magic = unit * (1.5 * 2.0**_FLOAT64_FRACTION_BITS)
    bits = torch.add(values, magic, out=out).view(torch.int64).sum(dim)
    return bits - magic.view(torch.int64).squeeze(dim) * values.shape[dim]  # whatever wraps round, wraps back


def to_limbs(values: Tensor) -> Tensor:
    """int64 ``[...]`` -> int64 ``[..., 2]``, high and low part; limbs of different values may be summed."""
    return torch.stack((values >> LIMB_BITS, values & ((1 << LIMB_BITS) - 1)), dim=-1)


def from_limbs(limbs: Tensor) -> Tensor:
    """Summed limbs int64 ``[..., 2]`` -> float64 ``[...]``, rounded twice at most."""
    return limbs[..., 0].to(torch.float64) * 2.0**LIMB_BITS + limbs[..., 1].to(torch.float64)
