"""Trains the missing runs of a study within a time limit."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gtpo_megatron.atomic_file import write_file
from gtpo_megatron.config.serialize import to_yaml
from gtpo_megatron.errors import ConfigError, GTPOError
from gtpo_megatron.orchestration.training_process import TrainingProcess
from gtpo_megatron.study.plan import PlannedRun, Train, fingerprint
from gtpo_megatron.study.run_summary import read_summary, summarise, write_summary

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
    train: Train,
    *,
    runs_dir: Path,
    output: Path,
    deadline: float,
    note: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> SessionReport:
    """Trains missing runs in order until all are done or time is up.

    After a failed run the next one starts; its folder stays, and the next session tries again.

    Args:
        runs: runs of the study.
        train: trains one run in its folder under ``runs_dir``.
        runs_dir: for run folders.
        output: for summaries, one JSON file per finished run.
        deadline: time of ``clock``, may be infinite. Runs are stopped ``STOP_S`` earlier.
        note: called with sentences about the progress.
        clock: seconds.

    Raises:
        ConfigError: a summary in ``output`` has other settings; raised before any run.
        DataError: a file in ``output`` is not a summary.
    """
    report = SessionReport()
    todo = [planned for planned in runs if not _is_done(planned, output)]
    for index, planned in enumerate(todo):
        report.missing = [later.name for later in todo[index:]] + list(report.failed)
        if deadline - clock() < MIN_START_S + STOP_S:
            note(f"time is up: {len(report.missing)} runs are still to be done")
            return report
        note(f"{planned.name}: run {len(runs) - len(todo) + index + 1} of {len(runs)}")
        start = clock()
        try:
            if not train(planned):
                note(f"{planned.name}: stopped; it goes on from its last checkpoint in the next session")
                return report
            write_summary(summarise(planned, runs_dir / planned.name), output / f"{planned.name}.json")
        except GTPOError as error:
            report.failed[planned.name] = f"{type(error).__name__}: {error}"
            note(f"{planned.name} failed: {report.failed[planned.name]}")
            continue
        note(f"{planned.name}: finished in {clock() - start:.0f} s")
    report.missing = list(report.failed)
    return report


def _is_done(planned: PlannedRun, output: Path) -> bool:
    path = output / f"{planned.name}.json"
    if not path.exists():
        return False
    found, wanted = read_summary(path).fingerprint, fingerprint(planned.config)
    if found != wanted:
        raise ConfigError(
            f"{path} is of a run with other settings (fingerprint {found}, now {wanted}); choose another "
            "--output and --runs-dir, or remove the summaries and run folders there"
        )
    return True


class ProcessTrainer:
    """Trains each run by ``gtpo-megatron train`` as a child process, and stops it before the deadline.

    Args:
        runs_dir: for run folders.
        deadline: time of ``time.monotonic`` by which a run must have ended.
    """

    def __init__(self, runs_dir: Path, *, deadline: float) -> None:
        self._runs_dir = runs_dir
        self._deadline = deadline

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
        run = TrainingProcess(config_file, folder, output=folder.with_name(f"{planned.name}.out"), resume=is_begun)
        try:
            state = run.wait_until(self._deadline - STOP_S)
            if state == "running":
                state = run.stop(within_s=STOP_S)
            return state == "finished"
        finally:
            run.kill()
