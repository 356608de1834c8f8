"""Runs checks one after another, each under a deadline; one that raises is a line, and the rest goes on."""

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gtpo_megatron.companions.preflight.finding import Finding, Line
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.untrusted.text import printable

logger = logging.getLogger(__name__)

LONGEST_CAUSE = 600
"""Characters of an error in a line."""

LEAST_S = 5.0
"""A check for which less time is left is not begun."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """A check.

    Attributes:
        name: for ``--only`` and ``--skip``.
        group: of checks, a heading in the report.
        what: is checked, for lines without a finding.
        find: yields findings.
        needs: checks without which it cannot be made.
        limit_s: longest time; it is also never more than what is left of the whole.
        remedy: what to do if it raises.
    """

    name: str
    group: str
    what: str
    find: Callable[[Any], Iterable[Finding]]
    needs: tuple[str, ...] = ()
    limit_s: float = 120.0
    remedy: str = "log.txt in the output folder has the whole of it; mend this first, later lines may follow from it"


class Budget:
    """The time of the whole.

    Args:
        seconds: of all checks together.
        clock: monotonic seconds.
    """

    def __init__(self, seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._end = clock() + seconds

    @property
    def left_s(self) -> float:
        """Seconds that are left; 0 if none are."""
        return max(0.0, self._end - self._clock())


class CheckRunner:
    """Runs the checks of a preflight, and keeps their lines.

    Args:
        checks: all, in order.
        chosen: names of those to make, with what they need (``chosen_checks``).
        budget: of the whole.
        show: called with every line.
        is_alive: called after a check has raised; False if the processes cannot be asked any more.

    Attributes:
        lines: so far.
        budget: as above.
    """

    def __init__(
        self,
        checks: Sequence[Check],
        chosen: Collection[str],
        budget: Budget,
        *,
        show: Callable[[Line], None],
        is_alive: Callable[[], bool] = lambda: True,
    ) -> None:
        self.lines: list[Line] = []
        self.budget = budget
        self._checks = {check.name: check for check in checks}
        self._chosen = frozenset(chosen)
        self._show = show
        self._is_alive = is_alive
        self._unusable: dict[str, str] = {}
        self._lost = ""
        self._limit_end = math.inf

    @property
    def limit_s(self) -> float:
        """Seconds that the running check has left, or the whole between checks."""
        return max(1.0, min(self._limit_end - time.monotonic(), self.budget.left_s))

    def wants(self, names: Iterable[str]) -> bool:
        """Whether any of these is to be made."""
        return not self._chosen.isdisjoint(names)

    def can(self, name: str) -> bool:
        """Whether nothing stands in the way of a check."""
        return self._obstacle(self._checks[name]) is None

    def run(self, name: str, room: object) -> None:
        """Makes a check, or says why not.

        Args:
            name: of the check.
            room: its argument.
        """
        check = self._checks[name]
        if name not in self._chosen:
            self._unusable[name] = "was left out"
            return
        if (obstacle := self._obstacle(check)) is not None:
            self._unusable[name] = "was not run"
            self._add(check, Finding(what=check.what, measured=obstacle, status="not run"), seconds=0.0)
            return
        began = time.monotonic()
        self._limit_end = began + check.limit_s
        try:
            for finding in check.find(room):
                self._add(check, finding, seconds=time.monotonic() - began)
        except Exception as error:  # any: the next check may say more
            logger.warning("%s raised", name, exc_info=True)
            self.fail(name, error, seconds=time.monotonic() - began)
        finally:
            self._limit_end = math.inf

    def fail(self, name: str, error: Exception, *, seconds: float) -> None:
        """Records that a check raised, and whether the processes are still there."""
        check = self._checks[name]
        self._unusable[name] = "failed"
        finding = Finding(
            what=check.what,
            measured=cause(error),
            expected="an answer",
            status="failed",
            remedy=check.remedy,
        )
        self._add(check, finding, seconds=seconds)
        if not self._lost and not self._is_alive():
            self._lost = name

    def note(self, name: str, finding: Finding, *, seconds: float) -> None:
        """Adds a line that was found outside of ``run``."""
        if name in self._chosen:
            self._add(self._checks[name], finding, seconds=seconds)

    def give_up(self, names: Iterable[str], why: str) -> None:
        """Records that these cannot be made any more."""
        given_up = self._chosen.intersection(names)
        for name, check in self._checks.items():
            if name in given_up:
                self._unusable[name] = "was not run"
                self._add(check, Finding(what=check.what, measured=why, status="not run"), seconds=0.0)

    def give_up_rest(self, why: str) -> None:
        """Records that what has no line yet cannot be made any more."""
        self.give_up(self._checks.keys() - {line.check for line in self.lines}, why)

    def _obstacle(self, check: Check) -> str | None:
        if self._lost:
            return f"the processes have not answered since {self._lost!r}"
        for needed in check.needs:
            if needed in self._unusable:
                return f"it needs {needed!r}, which {self._unusable[needed]}"
        if self.budget.left_s < LEAST_S:
            return f"the {self.budget.seconds:.0f} s of --seconds are over; allow more"
        return None

    def _add(self, check: Check, finding: Finding, *, seconds: float) -> None:
        line = Line(check=check.name, group=check.group, finding=finding, seconds=seconds)
        self.lines.append(line)
        self._show(line)


def cause(error: BaseException) -> str:
    """One line about an error."""
    text = " ".join(printable(error).split())
    shown = text if len(text) <= LONGEST_CAUSE else f"{text[:LONGEST_CAUSE]} ..."
    return f"{type(error).__name__}: {shown}"


def chosen_checks(checks: Sequence[Check], *, only: Sequence[str], skip: Sequence[str]) -> frozenset[str]:
    """Names of the checks to make: ``only`` with what they need, or all; less ``skip``.

    Raises:
        ConfigError: a name is unknown, or a check of ``only`` needs one of ``skip``.
    """
    by_name = {check.name: check for check in checks}
    for option, names in (("--only", only), ("--skip", skip)):
        for name in names:
            if name not in by_name:
                raise ConfigError(f"{option} {name}: no such check; there are {', '.join(by_name)}")
    found: set[str] = set()
    left = list(only or by_name)
    while left:
        name = left.pop()
        if name in skip:
            if only and name not in only:
                raise ConfigError(f"--skip {name}: a check of --only {' '.join(only)} needs it")
            continue
        if name not in found:
            found.add(name)
            left += by_name[name].needs if only else ()
    return frozenset(found)
