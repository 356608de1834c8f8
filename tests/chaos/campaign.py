"""Fault after fault against one run that goes on after each, until it is done; then it must equal one in peace."""

import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from gtpo_megatron.companions.verify_resume.compare import compare_runs
from gtpo_megatron.errors import GTPOError
from tests.chaos.faults import ENDS_RUN, Fault, is_named
from tests.chaos.world import BrokenRun

OURS = re.compile(r"^gtpo-megatron: \w+: .*$", re.MULTILINE)
"""The one line that a run ends with."""

LINE_S = 60.0
"""By when a run must have said who died."""
END_S = 150.0
NOT_UP = "it did not start ("
"""In the line of a run whose Ray did not come up: a busy machine, and no fault of ours."""
MAX_STARTS = 3
"""Starts of a run that must come to its end."""
GO_ON_STEPS = 2
"""A run that makes so many more steps goes on."""


@dataclass(kw_only=True, slots=True)
class Case:
    """What came of a fault.

    Attributes:
        fault: in words.
        stage: in which it really was.
        outcome: ``ended``, ``went on``, ``finished`` or ``hung``.
        named: whether its line names process and stage; None where none is asked for.
        line: that it ended with.
        status: of the driver that ended, unless it was the one that was struck; below zero if a signal ended it.
        seconds: from the fault to the line.
        left: behind.
        equal: to the run in peace, in the end; None where that was not reached.
    """

    fault: str
    stage: str
    outcome: str = ""
    named: bool | None = None
    line: str = ""
    status: int = 0
    seconds: float = 0.0
    left: list[str] = field(default_factory=list)
    equal: bool | None = None

    def is_good(self) -> bool:
        return (self.named is not False and not self.left and self.equal is not False and self.outcome != "hung") and (
            self.status >= 0 and self.seconds <= LINE_S
        )


class Campaign:
    """One reference run, and runs that are broken again and again.

    Args:
        folder: for all runs.
        num_steps: of each.
        options: of the recipe.
        say: told how it goes.
    """

    def __init__(self, folder: Path, *, num_steps: int, options: tuple[str, ...], say: Callable[[str], None]) -> None:
        self._folder = folder
        self._num_steps = num_steps
        self._options = options
        self._say = say
        self._num_runs = 0
        self._start_s = 40.0
        self._reference = folder / "whole"
        folder.mkdir(parents=True, exist_ok=True)

    def prepare(self) -> list[str]:
        """The run in peace; what it leaves behind."""
        if (self._reference / "report.html").exists():
            return []
        for _ in range(MAX_STARTS):
            shutil.rmtree(self._reference, ignore_errors=True)
            started = time.monotonic()
            run = self._start(self._reference, resume=False)
            while run.step < 0 and not run.has_ended():
                time.sleep(0.1)
                run.look()
            self._start_s = time.monotonic() - started
            while not run.has_ended():
                run.look()
                time.sleep(0.2)
            if run.process.returncode == 0 or NOT_UP not in run.output:
                break
            self._say(f"the run in peace: {NOT_UP}")
            run.clear()
        assert run.process.returncode == 0, run.output[-3000:]
        left = run.left_behind()
        run.clear()
        self._say(f"the run in peace took {time.monotonic() - started:.0f} s; left behind: {left or 'nothing'}")
        return left

    def attack(self, faults: Sequence[Fault], *, deadline: float) -> list[Case]:
        """As many of the faults as one run takes, from its start to its end."""
        folder = self._folder / f"broken_{self._num_runs}"
        self._num_runs += 1
        shutil.rmtree(folder, ignore_errors=True)
        cases: list[Case] = []
        run = self._start(folder, resume=False)
        for fault in faults:
            if time.monotonic() > deadline or (run.has_ended() and run.process.returncode == 0):
                break
            if run.has_ended():
                run.clear()
                run = self._start(folder, resume=True)
            case = self._one(run, fault)
            if case is None:
                if run.has_ended() and run.process.returncode != 0:
                    self._say(f"NOT STRUCK: {fault}: the run ended by itself: {run.output[-500:]}")
                    break
                continue
            cases.append(case)
            self._tell(case, run)
        self._finish(run, folder, cases)
        return cases

    def _start(self, folder: Path, *, resume: bool) -> BrokenRun:
        return BrokenRun(folder, num_steps=self._num_steps, options=self._options, resume=resume)

    def _one(self, run: BrokenRun, fault: Fault) -> Case | None:
        if fault.stage == "start" and run.step >= 0:
            fault = Fault(kind=fault.kind, stage="rollout", delay_s=fault.delay_s)
        if not run.wait_for_stage(fault, start_s=self._start_s, timeout_s=240.0):
            return None
        struck = run.strike(fault, timeout_s=60.0)
        at = time.monotonic()
        if struck is None:
            return None
        pid, stages = struck
        case = Case(fault=str(fault), stage="/".join(sorted(stages)))
        step = run.step
        must_end = fault.kind in ENDS_RUN
        while not run.has_ended() and time.monotonic() - at < END_S:
            if not must_end and run.step >= max(step, 0) + GO_ON_STEPS:
                case.outcome = "went on"
                return case
            time.sleep(0.1)
        if not run.has_ended():
            case.outcome, case.seconds = "hung", time.monotonic() - at
            case.line = run.output[-600:]
            run.process.kill()
            run.process.wait()
        elif run.process.returncode == 0:
            case.outcome = "finished"
        else:
            case.outcome, case.seconds = "ended", time.monotonic() - at
            if fault.kind != "driver":
                case.status = run.process.returncode
                lines = OURS.findall(run.output)
                case.line = lines[-1] if lines else run.output[-600:]
                case.named = len(lines) == 1 and is_named(fault, pid, case.line, stages | {"restart", "start"} & stages)
        case.left = run.left_behind()
        return case

    def _finish(self, run: BrokenRun, folder: Path, cases: list[Case]) -> None:
        """Lets the run come to its end, in peace, and compares."""
        for _ in range(MAX_STARTS):
            if run.has_ended() and run.process.returncode != 0:
                run.clear()
                run = self._start(folder, resume=True)
            while not run.has_ended():
                run.look()
                time.sleep(0.2)
        left = run.left_behind() if run.process.returncode == 0 else [f"ended: {run.output[-1500:]}"]
        run.clear()
        try:
            differences = [c.difference for c in compare_runs(self._reference, folder) if not c.is_equal]
        except (GTPOError, OSError) as error:
            differences = [str(error)]
        for case in cases:
            case.equal = not differences
        if cases and left:
            cases[-1].left += left
        self._say(
            f"{folder.name}: {f'DIFFERENT: {differences[0]}' if differences else 'equal'}; left: {left or 'nothing'}"
        )

    def _tell(self, case: Case, run: BrokenRun) -> None:
        self._say(
            f"{'ok ' if case.is_good() else 'BAD'} {case.fault} [{case.stage}]: {case.outcome}, named {case.named}, "
            f"status {case.status}, {case.seconds:.1f} s, left {case.left or 'nothing'}\n      {case.line[:400]}"
        )


def summary(cases: Sequence[Case]) -> dict:
    """The figures."""
    asked = [case for case in cases if case.named is not None]
    return {
        "tried": len(cases),
        "ended": sum(case.outcome in ("ended", "hung") for case in cases),
        "went_on": sum(case.outcome in ("went on", "finished") for case in cases),
        "lines_asked_for": len(asked),
        "named_rightly": sum(bool(case.named) for case in asked),
        "slowest_line_s": round(max((case.seconds for case in asked), default=0.0), 1),
        "left_something_behind": sum(bool(case.left) for case in cases),
        "resumed_equal": sum(case.equal is True for case in cases),
        "cases": [asdict(case) for case in cases],
    }
