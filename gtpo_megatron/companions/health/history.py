"""Values that a run has measured so far, as the signs read them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from gtpo_megatron.run_folder.metrics_file import finite

EDGE_STEPS = 5
"""Steps averaged at either end of a run: a single step says little."""


@dataclass(frozen=True, slots=True)
class History:
    """The rows of ``metrics.jsonl``.

    Attributes:
        rows: by ascending step; step 0 has what was measured before training.
    """

    rows: Sequence[Mapping[str, Any]]

    @property
    def steps(self) -> list[Mapping[str, Any]]:
        """The rows of training steps."""
        return [row for row in self.rows if row["step"] > 0]

    @property
    def recent(self) -> list[Mapping[str, Any]]:
        """The last steps."""
        return self.steps[-EDGE_STEPS:]

    def points(self, metric: str) -> list[tuple[int, float]]:
        """Step and value, where it is a number."""
        return [(row["step"], value) for row in self.rows if (value := finite(row.get(metric))) is not None]

    def values(self, metric: str) -> list[float]:
        """The values of ``points``."""
        return [value for _, value in self.points(metric)]

    def first_mean(self, metric: str) -> float | None:
        """Mean of the first steps; None unless there are enough for both ends."""
        values = self.values(metric)
        return fmean(values[:EDGE_STEPS]) if len(values) >= 2 * EDGE_STEPS else None

    def last_mean(self, metric: str) -> float | None:
        """Mean of the last steps; None if it was never measured."""
        values = self.values(metric)
        return fmean(values[-EDGE_STEPS:]) if values else None

    def middle(self, metric: str) -> float | None:
        """Median over all steps."""
        values = self.values(metric)
        return median(values) if values else None

    def total(self, metric: str, *, recent: bool = False) -> float | None:
        """Sum over all steps, or over the last ones; None if it was never measured."""
        rows = self.recent if recent else self.rows
        values = [value for row in rows if (value := finite(row.get(metric))) is not None]
        return sum(values) if values else None
