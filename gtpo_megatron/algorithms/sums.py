"""Sums over the tokens of all ranks that do not depend on the order of their terms, because they are sums of integers.

A floating-point sum depends in its last bits on the order of its terms, and so on the sharding. Here every term is
first rounded to a grid of integers, so any order of terms, any number of ranks and atomic additions on a GPU give the
same bits. All sums of credit over tokens use this module; losses are floating-point sums.

The maths follows local -> reduce -> apply: it computes additive numbers from this rank's responses, asks a
:class:`Reduction` for their totals and applies them. It never sees a process group, and the reduction no formula.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")

SUM_BITS = 62
"""Bits of the magnitude of a sum: int64 without the sign bit and one spare bit."""

_PART_TOKENS = {"cpu": 1 << 16, "cuda": 1 << 24}
_FLOAT64_BIAS = 1023
_FLOAT64_FRACTION_BITS = 52
_DROPPED_BITS = 21


class Reduction:
    """The ranks that the batch is sharded over; here: one process, which holds all responses.

    ``distributed.advantage_reducer.ProcessGroupReduction`` does the same over a process group.
    """

    def agree(self, read: Callable[[], Result], signature: str = "") -> Result:  # noqa: ARG002
        """What this rank reads; if one cannot, all ranks raise.

        Args:
            read: reads and checks this rank's inputs, without collectives. A GTPOError in it is raised on all ranks.
            signature: text that must be equal on all ranks, such as the configuration.
        """
        return read()

    def gather(self, values: Tensor) -> tuple[Tensor, slice]:
        """Gathers a few numbers of every response of the batch.

        Args:
            values: ``[B, ...]``, of this rank's responses.

        Returns:
            ``[R, ...]`` on the CPU, ordered by rank and the same on every rank; and which of its rows are this rank's.
        """
        return values.cpu(), slice(0, len(values))

    def max(self, values: Tensor) -> Tensor:
        """Maximum over ranks, elementwise, float64; may overwrite ``values``."""
        return values

    def sum(self, values: Tensor) -> Tensor:
        """Sum over ranks, elementwise, int64; may overwrite ``values``."""
        return values


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactSum:
    """Sums by key, each on a grid of its own.

    Attributes:
        units: ``[K]`` int64, the sum in grid steps.
        scale: ``[K]`` float64, grid steps per 1: powers of two.
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

        The quotient and the remainder are converted separately, so that the mean of equal terms is bit for bit that
        term, if it was rounded by ``significant``.
        """
        count = self.count.clamp(min=1)
        whole = self.units.div(count, rounding_mode="floor")
        rest = (self.units - whole * count).to(torch.float64) / count
        return (whole.to(torch.float64) + rest) / self.scale


def exact_sum(values: Tensor, key: Tensor, count: Tensor, reduction: Reduction) -> ExactSum:
    """``sum of values[i] over all i with key[i] = k``, over the tokens of all ranks, for every ``k``.

    The error per term is at most half a step, ``2 ** -62 * count * peak``; ``peak`` is the key's largest magnitude.

    Args:
        values: ``[N]`` float64, finite.
        key: ``[N]`` integers in [0, K), or bool.
        count: ``[K]`` int64, number of terms of each key over all ranks.
        reduction: the ranks that hold terms of these keys. Collectives: its ``max``, then its ``sum``.
    """
    peak = torch.zeros(len(count), dtype=torch.float64, device=values.device)
    for part, k in _parts(values, key):
        peak.scatter_reduce_(0, k, part.abs(), "amax")
    peak = reduction.max(peak)
    _, exponent = torch.frexp(peak * count)  # |sum| <= count * peak < 2 ** exponent
    scale = _power_of_two(SUM_BITS - exponent)
    units = torch.zeros(len(count), dtype=torch.int64, device=values.device)
    for part, k in _parts(values, key):
        units.scatter_add_(0, k, scale.gather(0, k).mul_(part).round_().to(torch.int64))
    return ExactSum(units=reduction.sum(units), scale=scale, count=count)


def combine_by_key_(
    values: Tensor, operation: Callable[[Tensor, Tensor], Tensor], by_key: Tensor, key: Tensor
) -> Tensor:
    """``operation(values[i], by_key[key[i]])`` in place, such as ``Tensor.sub_``, without a second ``[N]``."""
    for part, k in _parts(values, key):
        operation(part, by_key.gather(0, k))
    return values


def _parts(values: Tensor, key: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields parts whose intermediate values fit the processor's cache, with their keys as int64."""
    size = _PART_TOKENS.get(values.device.type, _PART_TOKENS["cpu"])
    for part, k in zip(torch.split(values, size), torch.split(key, size), strict=True):
        yield part, k.to(torch.int64)


def significant(values: Tensor) -> Tensor:
    """Rounds float64 to 32 significant bits (Veltkamp's splitting), so that up to ``2 ** 29`` equal values add exactly.

    Magnitudes above ``2 ** 1000`` overflow.
    """
    shifted = values * (2.0**_DROPPED_BITS + 1.0)
    dropped = shifted - values
    return shifted.sub_(dropped)


def _power_of_two(exponent: Tensor) -> Tensor:
    """``2 ** exponent`` from bits, because ``pow`` is not exact on every device; exponents in [-1022, 1023]."""
    biased = exponent.to(torch.int64).clamp(-_FLOAT64_BIAS + 1, _FLOAT64_BIAS) + _FLOAT64_BIAS
    return (biased << _FLOAT64_FRACTION_BITS).view(torch.float64)
