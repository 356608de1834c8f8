"""``gtpo-megatron study``."""

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gtpo_megatron.cli.arguments import parse_options
from gtpo_megatron.cli.command import Command
from gtpo_megatron.cli.interrupts import interrupted_by, interrupted_by_signals, interruption, status_of
from gtpo_megatron.config.configuration import configuration
from gtpo_megatron.config.named_function import called, named_function
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.run_folder import held_locks
from gtpo_megatron.run_folder.stop_request import EXIT_STOPPED

if TYPE_CHECKING:
    from gtpo_megatron.companions.study.plan import Study

DEFAULT_STUDY = "recipes.study:study"
DEFAULT_OUTPUT = "benchmarks/results/study"
SESSION_LOCK = ".session.lock"
"""In the folder of run folders: held by the session that trains there."""


@configuration
class StudyOptions:
    """Options of ``study``.

    Attributes:
        study: module:function or FILE.py:function that returns a study.
        arms: arms to run; none given means the study's default. The table has all finished runs, asked for or not.
        num_seeds: runs per arm; 0 means the study's default.
        num_steps: steps per run; 0 means the study's default.
        baseline: the arm that the others are compared with; empty means the study's default. Another one writes
            ``table_BASELINE.md`` and ``study_BASELINE.html``.
        minutes: time limit of this session; 0 sets none. The same command continues later.
        side_by_side: runs that are trained at once; the results are the same. More than cores gain nothing.
        blind: show counts, minutes and failures only, and no table before the last of the asked-for runs.
        output: folder of finished runs and table; empty means ``benchmarks/results/study``, for the default study only.
        shared: folders of other studies; a run that one of them has, with the same settings, is done.
        runs_dir: folder of the run folders, and of the page with the curves.
        table_only: write table and page of the finished runs; train nothing.
    """

    study: str = DEFAULT_STUDY
    arms: tuple[str, ...] = ()
    num_seeds: int = 0
    num_steps: int = 0
    baseline: str = ""
    minutes: float = 0.0
    side_by_side: int = 1
    blind: bool = False
    output: str = ""
    shared: tuple[str, ...] = ()
    runs_dir: str = "runs/study"
    table_only: bool = False

    def __post_init__(self) -> None:
        if self.side_by_side < 1:
            raise ConfigError(f"side_by_side={self.side_by_side}: must be at least 1")
        if self.num_seeds < 0:
            raise ConfigError(f"num_seeds={self.num_seeds}: must be at least 1, or 0 for the study's own number")
        if self.minutes < 0:
            raise ConfigError(f"minutes={self.minutes}: must be at least 0, which sets no limit")


def run(arguments: Sequence[str]) -> int:
    """``study``; status 1 if a run failed, 75 if time was up before all were done, 130 after Ctrl-C."""
    options = parse_options(StudyOptions, arguments, program="gtpo-megatron study")
    from gtpo_megatron.companions.study.finished import progress
    from gtpo_megatron.companions.study.page import write_results  # before training, since it fails without scipy
    from gtpo_megatron.companions.study.plan import planned_runs, require_needed
    from gtpo_megatron.companions.study.session import ProcessTrainer, SessionReport, run_session

    study = load_study(options.study)
    suffix = ""
    _require_known(study, options)
    if options.baseline not in ("", study.baseline):
        study, suffix = replace(study, baseline=options.baseline), f"_{options.baseline}"
    arms = options.arms or study.default_arms
    folders, runs_dir = _folders(options), Path(options.runs_dir)
    num_seeds, num_steps = options.num_seeds or study.num_seeds, options.num_steps or study.num_steps
    is_drawn_only = options.table_only and not options.blind
    runs = [] if is_drawn_only else planned_runs(study, arms, num_seeds=num_seeds, num_steps=num_steps)
    report = SessionReport()
    interrupted: KeyboardInterrupt | None = None
    note = _say_blindly if options.blind else _say
    if not options.table_only:
        require_needed(study)
        deadline = time.monotonic() + 60 * options.minutes if options.minutes > 0 else float("inf")
        try:
            with interrupted_by_signals(), _only_session(runs_dir):
                report = run_session(
                    runs,
                    ProcessTrainer(runs_dir, deadline=deadline),
                    runs_dir=runs_dir,
                    folders=folders,
                    deadline=deadline,
                    note=note,
                    side_by_side=options.side_by_side,
                )
        except KeyboardInterrupt as error:
            interrupted = error
            _say(f"{interruption(error)}; the same command goes on with the runs that are missing")
    said = progress(runs, folders) if options.blind else ""
    try:
        said = said or write_results(study, folders, runs_dir, num_steps=num_steps, suffix=suffix)
    except OSError as error:
        raise ConfigError(
            f"{error.filename or runs_dir}: cannot be written ({error.strerror}); the table goes to --output "
            f"{folders[0]}, the page to --runs-dir {runs_dir}: choose others, or change what is in the way there"
        ) from error
    _say(said)
    if interrupted is not None:  # a person is told so, a batch system that the study can go on
        return status_of(interrupted) if interrupted_by(interrupted) is signal.SIGINT else EXIT_STOPPED
    if report.failed:
        return 1
    return EXIT_STOPPED if report.missing else 0


def _require_known(study: "Study", options: StudyOptions) -> None:
    names = [arm.name for arm in study.arms]
    for option, asked in (("--arms", options.arms), ("--baseline", (options.baseline,) if options.baseline else ())):
        for name in asked:
            if name not in names:
                raise ConfigError(f"{option} {name!r}: the study {study.name!r} has {', '.join(names)}")


def _folders(options: StudyOptions) -> list[Path]:
    """The study's own folder and the shared ones.

    Raises:
        ConfigError: a shared one is not there, one is no folder or cannot be read, or another study than the default
            one has no folder of its own.
    """
    if not options.output and options.study != DEFAULT_STUDY:
        raise ConfigError(f"--study {options.study} needs an --output: {DEFAULT_OUTPUT} has another study's table")
    output, shared = Path(options.output or DEFAULT_OUTPUT), [Path(name) for name in options.shared]
    for name, path in zip(options.shared, shared, strict=True):
        if not name or not path.is_dir():
            raise ConfigError(f"--shared {path}: there is no such folder of a study")
    if output.exists() and not output.is_dir():
        raise ConfigError(f"--output {output}: is a file, expected a folder")
    for path in (output, *shared):
        if path.exists() and not os.access(path, os.R_OK | os.X_OK):
            raise ConfigError(f"{path}: its runs cannot be read; change its permissions")
    return [output, *shared]


@contextmanager
def _only_session(runs_dir: Path) -> Iterator[None]:
    """Holds the folder's lock: two sessions would write the same runs' settings and output.

    Raises:
        ConfigError: another session holds it, or the folder cannot be written.
    """
    try:
        runs_dir.mkdir(parents=True, exist_ok=True)
        descriptor = held_locks.acquire(runs_dir / SESSION_LOCK)
    except held_locks.NoLockError:
        yield  # a file system without locks
        return
    except OSError as error:
        raise ConfigError(f"--runs-dir {runs_dir}: cannot be written: {error.strerror}") from error
    if descriptor is None:
        raise ConfigError(f"--runs-dir {runs_dir}: another session trains there; wait for it, or choose another folder")
    try:
        yield
    finally:
        held_locks.let_go(descriptor)


def load_study(name: str) -> "Study":
    """Calls ``module:function`` or ``FILE.py:function``.

    Raises:
        ConfigError: no such module or function, or it does not return a Study.
    """
    from gtpo_megatron.companions.study.plan import Study

    found = called(named_function(name, what="study", example="recipes.study:study"), name, what="study")
    if not isinstance(found, Study):
        raise ConfigError(f"study {name!r} is {type(found).__name__}, expected a function that returns a Study")
    return found


def _say(sentence: str) -> None:
    sys.stdout.write(sentence + "\n")
    sys.stdout.flush()


def _say_blindly(sentence: str) -> None:
    """The first line: what follows it is the end of a failed run's output, where accuracies are."""
    _say(sentence.partition("\n")[0])


COMMAND = Command(
    usage="""\
  study [--minutes N] [--arms A B ...] [--num-seeds N] [--side-by-side N] [--blind] [--table-only]
                    compares algorithms over seeds on the tiny task; goes on where it was left""",
    run=run,
    options=StudyOptions,
)
