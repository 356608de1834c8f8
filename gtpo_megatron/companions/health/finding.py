"""Finding on one sign, and the level of a run."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum


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
        sign: its title.
        anchor: its section in ``docs/health.md``.
        level: green, amber or red.
        seen: what was measured, with its unit.
        rule: what makes it amber and red.
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
