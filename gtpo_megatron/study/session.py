"""Does the runs of a study that are still missing, as many as there is time for."""

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
"""With less time left to train no run is started: it would not get past its processes' start."""
STOP_S = 90.0
"""For the step that is going on and its checkpoint, kept free at the end of a session."""


@dataclass(kw_only=True, slots=True)
class SessionReport:
    """What a session left undone.

    Attributes:
        failed: runs that failed, with the reason.
        missing: runs that are still to be done, the stopped and the failed ones among them.
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
    """Does what is missing, in order, until all is done or time is up.

    A run that fails is noted and the next one goes on; its folder stays, and the next session tries again.

    Args:
        runs: of the study.
        train: does one run in its folder under ``runs_dir``.
        runs_dir: for run folders.
        output: for summaries, one JSON file a finished run.
        deadline: on ``clock``; infinite for no limit. Runs are stopped ``STOP_S`` earlier.
        note: told what happens, a sentence at a time.
        clock: seconds.

    Raises:
        ConfigError: a summary in ``output`` is of other settings; nothing has been started then.
        DataError: a file in ``output`` is no summary.
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
    """Trains each run by ``gtpo-megatron train`` in a process of its own, and stops it before time is up.

    Args:
        runs_dir: for run folders.
        deadline: on ``time.monotonic``, by which the run has ended, though it takes ``STOP_S`` to stop.
    """

    def __init__(self, runs_dir: Path, *, deadline: float) -> None:
        self._runs_dir = runs_dir
        self._deadline = deadline

    def __call__(self, planned: PlannedRun) -> bool:
        """One run, from its last checkpoint if it has one.

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
