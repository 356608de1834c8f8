"""Result of a check: one line with a measured figure, an expected figure and a status."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Status = Literal["passed", "failed", "noted", "not here", "not run"]
"""``noted``: measured, with nothing to expect. ``not here``: this machine or recipe has no such thing.
``not run``: for want of time, or because what it builds on failed."""

UNPROVEN: frozenset[Status] = frozenset({"failed", "not run"})
"""With one of these the whole has not passed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One line.

    Attributes:
        what: that was looked at.
        measured: figure with its unit, or what is there.
        expected: figure that decides; empty if there is none.
        status: see ``Status``.
        remedy: what to do about a failure.
        figures: the same in numbers, by name with its unit.
    """

    what: str
    measured: str
    status: Status
    expected: str = ""
    remedy: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A finding in the report.

    Attributes:
        check: that found it.
        group: of checks.
        finding: itself.
        seconds: that the check had taken when it said so.
    """

    check: str
    group: str
    finding: Finding
    seconds: float


def assessed(
    what: str, measured: str, *, is_good: bool, expected: str, remedy: str, figures: Mapping[str, float] | None = None
) -> Finding:
    """A finding that passed or failed."""
    return Finding(
        what=what,
        measured=measured,
        expected=expected,
        status="passed" if is_good else "failed",
        remedy="" if is_good else remedy,
        figures=figures or {},
    )


def noted(what: str, measured: str, *, why: str, figures: Mapping[str, float] | None = None) -> Finding:
    """A figure without an expectation, and why there is none."""
    return Finding(
        what=what, measured=measured, expected=f"no expectation: {why}", status="noted", figures=figures or {}
    )


def not_here(what: str, why: str) -> Finding:
    """A check that does not exist on this machine, or for this recipe."""
    return Finding(what=what, measured=why, status="not here")


def has_passed(lines: Sequence[Line]) -> bool:
    """Whether something passed, and nothing failed or was not run."""
    statuses = {line.finding.status for line in lines}
    return "passed" in statuses and not statuses & UNPROVEN
