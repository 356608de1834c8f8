"""The finding on a sign, and what a run has measured so far, as the signs read it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from statistics import fmean, median
from typing import Any

from gtpo_megatron.run_folder.metrics_file import finite


class Level(IntEnum):
    """How bad a sign is; the largest of a run is the run's."""

    GREEN = 0
    AMBER = 1
    RED = 2

    @property
    def word(self) -> str:
        """In lower case."""
        return self.name.lower()


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One line.

    Attributes:
        sign: title of the sign.
        anchor: its section in ``docs/health.md``.
        level: green, amber or red.
        seen: measured value with its unit.
        rule: limits of amber and red.
    """

    sign: str
    anchor: str
    level: Level
    seen: str
    rule: str


def worst(findings: Sequence[Finding]) -> Level:
    """The level of a run; green without a finding."""
    return max((finding.level for finding in findings), default=Level.GREEN)


def level_above(value: float, amber: float, red: float) -> Level:
    """Red from ``red`` on, amber from ``amber`` on; a value that is not a number is red."""
    if not value < red:
        return Level.RED
    return Level.AMBER if value >= amber else Level.GREEN


EDGE_STEPS = 5
"""Steps averaged at either end of a run: a single step says little."""


@dataclass(frozen=True, slots=True)
class History:
    """The rows of ``metrics.jsonl``.

    Attributes:
        rows: metrics by ascending step; step 0 has what was measured before training.
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
