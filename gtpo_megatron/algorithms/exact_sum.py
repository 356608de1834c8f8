"""Sums over tokens that do not depend on the order of their terms, because they are sums of integers.

A floating-point sum changes in its last bits with the order of its terms, and so with how responses are sharded over
ranks. Here every term is first rounded to a grid; sums of integers are exact, so any order of terms, any number of
ranks and atomic additions on a GPU give the same bits. No other module of the package adds across tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gtpo_megatron.algorithms.batch.reduction import KeyReduction

SUM_BITS = 62
"""Bits of magnitude that a sum may take: an int64 without its sign and with one bit of room."""

_FLOAT64_BIAS = 1023
_FLOAT64_FRACTION_BITS = 52
_DROPPED_BITS = 21


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactSum:
    """Sums by key, each on a grid of its own.

    Attributes:
        units: ``[K]`` int64, the sum in steps of the grid.
        scale: ``[K]`` float64, steps per 1: powers of two.
        count: ``[K]`` int64, number of terms.
    """

    units: Tensor
    scale: Tensor
    count: Tensor

    @property
    def total(self) -> Tensor:
        """``[K]`` float64."""
        return self.units.to(torch.float64) / self.scale

    @property
    def mean(self) -> Tensor:
        """``[K]`` float64, 0 without terms.

        The quotient and the remainder are divided apart, so that the mean of equal terms is that term, bit for bit, if
        it has ``significant`` digits only.
        """
        count = self.count.clamp(min=1)
        whole = self.units.div(count, rounding_mode="floor")
        rest = (self.units - whole * count).to(torch.float64) / count
        return (whole.to(torch.float64) + rest) / self.scale


def exact_sum(values: Tensor, key: Tensor, count: Tensor, reduction: KeyReduction) -> ExactSum:
    """``sum of values[i] over all i with key[i] = k``, over the tokens of all ranks, for every ``k``.

    A term is off by at most half a step, ``2 ** -62 * count * peak``, where ``peak`` is the key's largest magnitude.

    Args:
        values: ``[N]`` float64, finite.
        key: ``[N]`` int64 in [0, K).
        count: ``[K]`` int64, number of terms of each key over all ranks.
        reduction: who else has terms of these keys. Collectives: its ``max``, then its ``sum``.
    """
    terms = values.abs()
    peak = torch.zeros(len(count), dtype=torch.float64, device=values.device)
    peak = reduction.max(peak.scatter_reduce_(0, key, terms, "amax"))
    _, exponent = torch.frexp(peak * count)  # |sum| <= count * peak < 2 ** exponent
    scale = _power_of_two(SUM_BITS - exponent)
    torch.index_select(scale, 0, key, out=terms).mul_(values).round_()
    units = torch.zeros(len(count), dtype=torch.int64, device=values.device)
    units = reduction.sum(units.scatter_add_(0, key, terms.to(torch.int64)))
    return ExactSum(units=units, scale=scale, count=count)


def significant(values: Tensor) -> Tensor:
    """Rounds float64 to 32 significant bits (Veltkamp's splitting), so that up to ``2 ** 29`` equal values add exactly.

    Magnitudes above ``2 ** 1000`` overflow.
    """
    shifted = values * (2.0**_DROPPED_BITS + 1.0)
    return shifted.sub_(shifted - values)


def _power_of_two(exponent: Tensor) -> Tensor:
    """``2 ** exponent``, assembled from bits: exact, unlike a vendor's ``pow``; exponents in [-1022, 1023]."""
    biased = exponent.to(torch.int64).clamp(-_FLOAT64_BIAS + 1, _FLOAT64_BIAS) + _FLOAT64_BIAS
    return (biased << _FLOAT64_FRACTION_BITS).view(torch.float64)
