"""Trains the missing runs of a study within a time limit."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from gtpo_megatron.atomic_file import write_file
from gtpo_megatron.companions.study.finished import done_runs
from gtpo_megatron.companions.study.plan import PlannedRun
from gtpo_megatron.companions.study.run_summary import summarise
from gtpo_megatron.companions.study.runs_file import append_run
from gtpo_megatron.companions.training_process import TrainingProcess
from gtpo_megatron.config.serialize import to_yaml
from gtpo_megatron.errors import GTPOError

MIN_START_S = 60.0
"""No run is started with less time left."""
STOP_S = 90.0
"""Time reserved at the end of a session for a step and its checkpoint."""


@dataclass(kw_only=True, slots=True)
class SessionReport:
    """The unfinished runs of a session.

    Attributes:
        failed: runs that failed, with the reason.
        missing: unfinished runs, including stopped and failed ones.
    """

    failed: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)


def run_session(
    runs: Sequence[PlannedRun],
    train: "ProcessTrainer",
    *,
    runs_dir: Path,
    folders: Sequence[Path],
    deadline: float,
    note: Callable[[str], None],
    side_by_side: int = 1,
    clock: Callable[[], float] = time.monotonic,
) -> SessionReport:
    """Trains missing runs in order until all are done or time is up.

    After a failed run the others go on; it is tried once more at the end of the session, and again in the next one.

    Args:
        runs: runs of the study.
        train: trains one run in its folder under ``runs_dir``.
        runs_dir: for run folders.
        folders: of finished runs, a file each; new ones go to the first.
        deadline: time of ``clock``, may be infinite. Runs are stopped ``STOP_S`` earlier.
        note: called with sentences about the progress.
        side_by_side: runs that are trained at once.
        clock: seconds.

    Raises:
        ConfigError: a finished run has other settings; raised before any run.
        DataError: a file of finished runs is damaged.
    """
    done = done_runs(runs, folders)
    todo = [planned for planned in runs if planned.name not in done]
    session = _Session(todo, num_done=len(runs) - len(todo), note=note, clock=clock)
    time_is_up = False
    with ThreadPoolExecutor(side_by_side) as pool:
        try:
            while session.goes_on:
                while session.waiting and not session.is_over and len(session.running) < side_by_side:
                    if deadline - clock() < MIN_START_S + STOP_S:
                        session.is_over = time_is_up = True
                    else:
                        session.start(pool, train)
                for ended in wait(session.running, return_when=FIRST_COMPLETED).done:
                    session.take(ended, runs_dir, folders[0])
        except BaseException:
            note("the runs that are being trained are saved first")
            train.abandon()  # or the pool would wait for the ends of these runs
            raise
    report = session.report()
    if time_is_up:
        note(f"time is up: {len(report.missing)} runs are still to be done")
    return report


class _Session:
    """Runs that wait, that are under way, and that have failed."""

    def __init__(
        self, todo: Sequence[PlannedRun], *, num_done: int, note: Callable[[str], None], clock: Callable[[], float]
    ) -> None:
        self.waiting = deque(todo)
        self.running: dict[Future[bool], tuple[PlannedRun, float]] = {}
        self.is_over = False
        self._places = {planned.name: num_done + index for index, planned in enumerate(todo, start=1)}
        self._num_runs = num_done + len(todo)
        self._finished: set[str] = set()
        self._failed: dict[str, str] = {}
        self._note = note
        self._clock = clock

    @property
    def goes_on(self) -> bool:
        return bool(self.running or (self.waiting and not self.is_over))

    def start(self, pool: ThreadPoolExecutor, train: "ProcessTrainer") -> None:
        """Starts the first of those that wait."""
        planned = self.waiting.popleft()
        again = ", again" if planned.name in self._failed else ""
        self._note(f"{planned.name}: run {self._places[planned.name]} of {self._num_runs}{again}")
        self.running[pool.submit(train, planned)] = (planned, self._clock())

    def take(self, ended: Future[bool], runs_dir: Path, output: Path) -> None:
        """Writes the summary of a finished run; puts a run that failed for the first time behind all others."""
        planned, start = self.running.pop(ended)
        try:
            if not ended.result():
                self._note(f"{planned.name}: stopped; it goes on from its last checkpoint in the next session")
                self.is_over = True
                return
            append_run(output, summarise(planned, runs_dir / planned.name))
        except Exception as error:  # noqa: BLE001 - whatever is wrong with one run, the others go on; it is said
            if planned.name not in self._failed:
                self.waiting.append(planned)
            self._failed[planned.name] = f"{type(error).__name__}: {error}"
            self._note(f"{planned.name} failed: {self._failed[planned.name]}")
            return
        self._finished.add(planned.name)
        self._failed.pop(planned.name, None)
        self._note(f"{planned.name}: finished in {self._clock() - start:.0f} s")

    def report(self) -> SessionReport:
        missing = [name for name in self._places if name not in self._finished]
        return SessionReport(failed=self._failed, missing=missing)


class ProcessTrainer:
    """Trains each run by ``gtpo-megatron train`` as a child process, and stops it before the deadline.

    Args:
        runs_dir: for run folders.
        deadline: time of ``time.monotonic`` by which a run must have ended.
    """

    def __init__(self, runs_dir: Path, *, deadline: float) -> None:
        self._runs_dir = runs_dir
        self._deadline = deadline
        self._lock = Lock()
        self._running: list[TrainingProcess] = []
        self._is_abandoned = False

    def __call__(self, planned: PlannedRun) -> bool:
        """Trains one run, from its last checkpoint if it has one.

        Raises:
            WorkerError: it failed.
        """
        folder = self._runs_dir / planned.name
        folder.parent.mkdir(parents=True, exist_ok=True)
        config_file = folder.with_name(f"{planned.name}.yaml")
        write_file(config_file, to_yaml(planned.config))
        is_begun = (folder / "config.yaml").exists()
        with self._lock:
            if self._is_abandoned:
                return False
            run = TrainingProcess(config_file, folder, output=folder.with_name(f"{planned.name}.out"), resume=is_begun)
            self._running.append(run)
        try:
            state = run.wait_until(self._deadline - STOP_S)
            if state == "running":
                state = run.stop(within_s=STOP_S)
            return state == "finished"
        finally:
            run.kill()
            with self._lock:
                self._running.remove(run)

    def abandon(self) -> None:
        """Has running ones save themselves, kills those that are too slow, and starts none any more."""
        with self._lock:
            self._is_abandoned = True
            running = tuple(self._running)
        try:
            for run in running:
                run.ask_to_stop()
            deadline = time.monotonic() + STOP_S
            for run in running:
                with suppress(GTPOError):  # it failed, which whoever waits for it says
                    run.wait_until(deadline)
        finally:  # also if it was interrupted in turn
            for run in running:
                run.kill()
