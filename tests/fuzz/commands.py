"""Calls a command in this process, up to where it would start others, and says what became of it."""

import contextlib
import io
import logging
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from gtpo_megatron.cli import dispatch
from gtpo_megatron.companions.report.watch import ReportServer
from gtpo_megatron.errors import WorkerError
from gtpo_megatron.observability.logs import PACKAGES
from launchers import local, slurm
from tools import convert_checkpoint

REACHED = "all checks were passed"
DEADLINE_S = 20.0
"""Of one command; the slowest takes a second on an idle machine."""
MOST_LINES = 3
TYROS = "For full helptext"
"""In every error of tyro, which is a box and not a line."""

_LOG_LINE = re.compile(r"\d{4}-\d\d-\d\d [\d:,]+ (INFO|WARNING) ")
"""Of a run, which says what it does before it refuses to go on."""

Snapshot = dict[str, tuple[int, int, int]]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a command left.

    Attributes:
        status: to exit with.
        out: standard output.
        err: standard error.
        crash: the traceback of what it did not catch; empty where it caught all.
    """

    status: int
    out: str
    err: str
    crash: str

    @property
    def is_accepted(self) -> bool:
        """It would have gone on, or has done what was asked for."""
        return not self.crash and (self.status == 0 or REACHED in self.err or REACHED in self.out)

    def complaint(self) -> str:
        """What is wrong with how it refused; empty for one line or three."""
        if self.crash:
            return f"a traceback: {self.crash}"
        lines = [line for line in self.err.strip().splitlines() if not _LOG_LINE.match(line)]
        if not lines:
            return f"status {self.status} without a word"
        if len(lines) > MOST_LINES and TYROS not in self.err:
            return f"{len(lines)} lines"
        return "a traceback in its words" if "Traceback" in self.err else ""


def call(arguments: Sequence[str]) -> Outcome:
    """Runs ``gtpo-megatron``, or another program whose name comes first."""
    programs: dict[str, Callable[[Sequence[str]], int]] = {
        "launchers.local": local.run,
        "launchers.slurm": slurm.run,
        "convert_checkpoint": lambda rest: convert_checkpoint.main(list(rest)),
    }
    run = programs.get(arguments[0], lambda _: dispatch.run(arguments))
    out, err, crash, status = io.StringIO(), io.StringIO(), "", 1
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        _nothing_to_read(),
        _logs_as_before(),
        _short_of_processes(),
        _deadline(),
    ):
        try:
            status = run(arguments[1:])
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else 1
        except BaseException as error:  # noqa: BLE001  whatever it is, it is what a user would see as a traceback
            crash = "".join(traceback.format_exception(error))
    return Outcome(status=status, out=out.getvalue(), err=err.getvalue(), crash=crash)


@contextlib.contextmanager
def _nothing_to_read() -> Iterator[None]:
    """pytest's own standard input refuses to be read, which a library may try for a program that it starts."""
    with open(os.devnull, encoding="utf-8") as nothing:  # noqa: PTH123
        before, sys.stdin = sys.stdin, nothing
        try:
            yield
        finally:
            sys.stdin = before


@contextlib.contextmanager
def _logs_as_before() -> Iterator[None]:
    """A command sets levels and handlers up for a whole process, and this one goes on with other tests."""
    root = logging.getLogger()
    loggers = [root, *(logging.getLogger(name) for name in PACKAGES)]
    levels, handlers = [logger.level for logger in loggers], list(root.handlers)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        root.handlers[:] = handlers
        logging.captureWarnings(capture=False)


def _reached(*_: object, **__: object) -> None:
    raise WorkerError(REACHED)


@contextlib.contextmanager
def _short_of_processes() -> Iterator[None]:
    """Where processes would be started, or a page served for ever, the checks are over."""

    def serve(server: ReportServer) -> None:
        server._server.RequestHandlerClass.args[0].page()
        server._server.server_close()

    with contextlib.ExitStack() as stack:
        for name in (
            "gtpo_megatron.train._stages",
            "gtpo_megatron.companions.verify_resume.verify.TrainingProcess",
            "gtpo_megatron.companions.study.session.TrainingProcess",
            "gtpo_megatron.companions.evaluate.evaluation_run._engine",
            "gtpo_megatron.companions.evaluate.evaluation_run.RewardPool",
            "launchers.local._run",
        ):
            stack.enter_context(mock.patch(name, _reached))
        stack.enter_context(mock.patch.object(ReportServer, "serve", serve))
        stack.enter_context(mock.patch("gtpo_megatron.orchestration.on_ray.worker_servers.WorkerServers.start"))
        yield


@contextlib.contextmanager
def _deadline() -> Iterator[None]:
    def too_late(*_: object) -> None:
        raise TimeoutError(f"no answer within {DEADLINE_S} s")

    before = signal.signal(signal.SIGALRM, too_late)
    signal.setitimer(signal.ITIMER_REAL, DEADLINE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def snapshot(root: Path) -> Snapshot:
    """Kind, size and time of everything in a folder."""
    found: Snapshot = {}
    for path in sorted(root.rglob("*")):
        state = path.lstat()
        found[str(path.relative_to(root))] = (
            state.st_mode,
            0 if path.is_dir() else state.st_size,
            0 if path.is_dir() else state.st_mtime_ns,
        )
    return found
