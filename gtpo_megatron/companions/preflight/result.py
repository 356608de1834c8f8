"""What a check has measured: one line with a value, the value that was expected, and a status.

This module and ``page.py`` need the standard library only: the GPU proof reads results on a machine that has no more.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Status = Literal["passed", "failed", "not run", "noted", "not here"]
"""``noted``: measured, with nothing to expect. ``not here``: this machine or recipe has no such thing.
``not run``: for want of time, or because what it builds on failed."""

STATUSES: tuple[Status, ...] = ("passed", "failed", "not run", "noted", "not here")

UNPROVEN: frozenset[Status] = frozenset({"failed", "not run"})
"""With one of these the whole has not passed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """One line of a report.

    Attributes:
        what: subject of the measurement.
        measured: value with its unit, or a description of what is there.
        status: outcome, see ``Status``.
        expected: value that decides; empty if there is none.
        remedy: advice for a failure.
        figures: numbers behind ``measured``, by name.
        detail: long text for a failure, such as the end of a log.
        check: name of the check.
        group: heading of the report.
        seconds: time of the check until this result.
    """

    what: str
    measured: str
    status: Status
    expected: str = ""
    remedy: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)
    detail: str = ""
    check: str = ""
    group: str = ""
    seconds: float = 0.0


def assessed(
    what: str, measured: str, *, is_good: bool, expected: str, remedy: str, figures: Mapping[str, float] | None = None
) -> CheckResult:
    """A result that passed or failed."""
    return CheckResult(
        what=what,
        measured=measured,
        expected=expected,
        status="passed" if is_good else "failed",
        remedy="" if is_good else remedy,
        figures=figures or {},
    )


def noted(what: str, measured: str, *, why: str, figures: Mapping[str, float] | None = None) -> CheckResult:
    """A value without an expectation, and why there is none."""
    return CheckResult(
        what=what, measured=measured, expected=f"no expectation: {why}", status="noted", figures=figures or {}
    )


def not_here(what: str, why: str) -> CheckResult:
    """A check that does not exist on this machine, or for this recipe."""
    return CheckResult(what=what, measured=why, status="not here")


def has_passed(results: Sequence[CheckResult]) -> bool:
    """Whether something passed, and nothing failed or was not run."""
    statuses = {result.status for result in results}
    return "passed" in statuses and not statuses & UNPROVEN


def summary(results: Sequence[CheckResult]) -> str:
    """``17 passed, 2 noted, 4 not here``."""
    counts = Counter(result.status for result in results)
    return ", ".join(f"{count} {status}" for status in STATUSES if (count := counts[status]))


def bounded(
    what: str,
    measured: str,
    *,
    is_good: bool,
    expected: str,
    remedy: str,
    unknown: str | None,
    figures: Mapping[str, float],
) -> CheckResult:
    """The same of a bound that a plan has; ``unknown`` says why it has none, and only then the value is just noted."""
    if unknown is not None:
        return noted(what, measured, why=unknown, figures=figures)
    return assessed(what, measured, is_good=is_good, expected=expected, remedy=remedy, figures=figures)
