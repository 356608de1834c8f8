"""Runs checks one after another, each under a deadline; one that raises is a line, and the rest goes on."""

import logging
import math
import time
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from gtpo_megatron.companions.preflight.result import CheckResult
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.untrusted.text import printable

logger = logging.getLogger(__name__)

LONGEST_CAUSE = 600
"""Characters of an error in a line."""

LONGEST_S = 120.0
"""Of one check; it is also never more than what is left of the whole."""

LEAST_S = 5.0
"""A check for which less time is left is not begun."""

Results = Generator[CheckResult, None, Any]
"""What the function of a check yields; what it returns is for later checks."""


@dataclass(frozen=True, slots=True)
class PreflightCheck:
    """A row of the catalogue.

    Attributes:
        name: word for ``--only`` and ``--skip``.
        group: heading in the report.
        what: subject, for lines without a result.
        function: yields results; its argument is a ``PreflightContext``.
        needs: checks without which it cannot be made.
        remedy: advice if it raises.
    """

    name: str
    group: str
    what: str
    function: Callable[[Any], Results]
    _: KW_ONLY
    needs: tuple[str, ...] = ()
    remedy: str = "log.txt in the output folder has the whole of it; mend this first, later lines may follow from it"


class CheckRunner:
    """Runs the checks of a preflight.

    Args:
        checks: all, in order.
        chosen: names of those to make, with what they need (``chosen_checks``).
        seconds: time for all of them.
        show: called with every result.
        is_alive: called after a check has raised; False if the processes cannot be asked any more.
        clock: monotonic seconds.

    Attributes:
        results: results so far.
        values: return values of the checks so far, by name.
        seconds: time for all checks.
    """

    def __init__(
        self,
        checks: Sequence[PreflightCheck],
        chosen: Collection[str],
        seconds: float,
        *,
        show: Callable[[CheckResult], None],
        is_alive: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.results: list[CheckResult] = []
        self.values: dict[str, Any] = {}
        self.seconds = seconds
        self._checks = {check.name: check for check in checks}
        self._chosen = frozenset(chosen)
        self._show, self._is_alive, self._clock = show, is_alive, clock
        self._end, self._check_end = clock() + seconds, math.inf
        self._unusable: dict[str, str] = {}
        self._lost = ""

    def seconds_left(self) -> float:
        """Seconds for the running check, or for the whole between checks; 0 if none are left."""
        return max(0.0, min(self._check_end, self._end) - self._clock())

    def wants(self, names: Iterable[str]) -> bool:
        """Whether any of these is to be made."""
        return not self._chosen.isdisjoint(names)

    def can(self, name: str) -> bool:
        """Whether nothing stands in the way of a check."""
        return self._obstacle(self._checks[name]) is None

    def run(self, name: str, context: object) -> None:
        """Makes a check, or says why not."""
        check = self._checks[name]
        if name not in self._chosen:
            self._unusable[name] = "was left out"
            return
        if (obstacle := self._obstacle(check)) is not None:
            self.give_up([name], obstacle)
            return
        began = self._clock()
        self._check_end = began + LONGEST_S
        try:
            for result in self._made(check, context):
                self.add(name, result, seconds=self._clock() - began)
        except Exception as error:  # any: the next check may say more
            logger.warning("%s raised", name, exc_info=True)
            self.fail(name, error, seconds=self._clock() - began)
        finally:
            self._check_end = math.inf

    def _made(self, check: PreflightCheck, context: object) -> Results:
        self.values[check.name] = yield from check.function(context)

    def fail(self, name: str, error: Exception, *, seconds: float) -> None:
        """Records that a check raised, and whether the processes are still there."""
        check = self._checks[name]
        self._unusable[name] = "failed"
        result = CheckResult(
            what=check.what, measured=cause(error), expected="an answer", status="failed", remedy=check.remedy
        )
        self.add(name, result, seconds=seconds)
        if not self._lost and not self._is_alive():
            self._lost = name

    def add(self, name: str, result: CheckResult, *, seconds: float) -> None:
        """Records a result of a check."""
        result = replace(result, check=name, group=self._checks[name].group, seconds=seconds)
        self.results.append(result)
        self._show(result)

    def give_up(self, names: Iterable[str], why: str) -> None:
        """Records that these are not made, as far as they are wanted."""
        given_up = self._chosen.intersection(names)
        for name, check in self._checks.items():
            if name in given_up:
                self._unusable[name] = "was not run"
                self.add(name, CheckResult(what=check.what, measured=why, status="not run"), seconds=0.0)

    def give_up_rest(self, why: str) -> None:
        """Records that the checks without a line are not made."""
        self.give_up(self._checks.keys() - {result.check for result in self.results}, why)

    def _obstacle(self, check: PreflightCheck) -> str | None:
        if self._lost:
            return f"the processes have not answered since {self._lost!r}"
        for needed in check.needs:
            if needed in self._unusable:
                return f"it needs {needed!r}, which {self._unusable[needed]}"
        if self.seconds_left() < LEAST_S:
            return f"the {self.seconds:.0f} s of --seconds are over; allow more"
        return None


def cause(error: BaseException) -> str:
    """One line about an error."""
    text = " ".join(printable(error).split())
    shown = text if len(text) <= LONGEST_CAUSE else f"{text[:LONGEST_CAUSE]} ..."
    return f"{type(error).__name__}: {shown}"


def chosen_checks(checks: Sequence[PreflightCheck], *, only: Sequence[str], skip: Sequence[str]) -> frozenset[str]:
    """Names of the checks to make: ``only`` with what they need, or all; less ``skip``.

    Raises:
        ConfigError: a name is unknown, or a check of ``only`` needs one of ``skip``.
    """
    by_name = {check.name: check for check in checks}
    for option, names in (("--only", only), ("--skip", skip)):
        for name in names:
            if name not in by_name:
                raise ConfigError(f"{option} {name}: no such check; there are {', '.join(by_name)}")
    chosen: set[str] = set()
    left = list(only or by_name)
    while left:
        name = left.pop()
        if name in skip:
            if only and name not in only:
                raise ConfigError(f"--skip {name}: a check of --only {' '.join(only)} needs it")
            continue
        if name not in chosen:
            chosen.add(name)
            left += by_name[name].needs if only else ()
    return frozenset(chosen)
