"""Counts of values on a fixed logarithmic grid: they add up over ranks exactly, and quantiles are read from them.

The grid has 32 bins per octave from 2^-40 to 2^10, so a quantile is at most 2.2% above the value it stands for.
"""

import bisect
import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

BINS_PER_OCTAVE = 32
LOWEST_EXPONENT, HIGHEST_EXPONENT = -40, 10
RESOLUTION = 2.0 ** (1 / BINS_PER_OCTAVE)
"""Ratio of neighbouring edges."""

EDGES = tuple(
    2.0 ** (LOWEST_EXPONENT + index / BINS_PER_OCTAVE)
    for index in range((HIGHEST_EXPONENT - LOWEST_EXPONENT) * BINS_PER_OCTAVE + 1)
)
"""Bin ``b`` holds the values in ``(EDGES[b - 1], EDGES[b]]``; bin 0 all up to the first edge, which count as 0; the bin
after the last edge all larger values, infinity and NaN."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """Numbers of values per bin.

    Attributes:
        counts: bin and number of its values, ascending, without empty bins.
    """

    counts: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, values: "Tensor") -> "Histogram":
        """Counts values ``[N]`` that are 0 or more, or NaN."""
        import torch  # takes seconds, and commands read metrics without it

        edges = torch.tensor(EDGES, dtype=torch.float64)
        bins, numbers = torch.unique(torch.bucketize(values.double().cpu(), edges), return_counts=True)
        return cls(tuple(zip(bins.tolist(), numbers.tolist(), strict=True)))

    @property
    def num_values(self) -> int:
        """Number of values."""
        return sum(number for _, number in self.counts)

    def __add__(self, other: "Histogram") -> "Histogram":
        """The histogram of both sets of values."""
        total = Counter(dict(self.counts))
        total.update(dict(other.counts))
        return Histogram(tuple(sorted(total.items())))

    def quantile(self, share: float) -> float:
        """The least edge that at least ``share`` of the values do not exceed.

        Returns:
            0 for the lowest bin, infinity for the highest, NaN without values.
        """
        needed, found = max(1, math.ceil(share * self.num_values)), 0
        for index, number in self.counts:
            found += number
            if found >= needed:
                return _upper_edge(index)
        return math.nan

    def count_above(self, bound: float) -> int:
        """Number of values in the bins above the one that holds ``bound``."""
        last = bisect.bisect_left(EDGES, bound)
        return sum(number for index, number in self.counts if index > last)


def _upper_edge(index: int) -> float:
    if index == 0:
        return 0.0
    return EDGES[index] if index < len(EDGES) else math.inf
