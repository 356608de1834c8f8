"""The supervisor of a run: a thread of the driver, which sees who dies, and a process beside it, which outlives it.

An error of a stage is often only a consequence of a death, and without Ray's GCS or raylet some calls never return. So
the driver asks who has died when a stage has failed, and while it waits. Deaths on other machines are known from Ray's
errors (``on_ray/collect.py``). Once the driver is gone without having cleaned up, the process beside, which knows the
same processes, says why, as far as the thread has left word, and cleans up.

Only what belongs to the run is ended: descendants of the driver, named processes and theirs, and processes that write
below the run's temporary folder or use it as theirs. Children that the driver has not named may be a logger's: they
live as long as the driver.
"""

import contextlib
import json
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from gtpo_megatron.errors import DataError, WorkerError
from gtpo_megatron.run_folder import state as run_state
from gtpo_megatron.supervision import process_tree
from gtpo_megatron.supervision.deaths import Death, named_death
from gtpo_megatron.supervision.family import Family

logger = logging.getLogger(__name__)

RUN_FILE = ".run.json"  # in the temporary folder, for the process beside: the driver, and what was there before the run
WORD_FILE = ".word.json"  # likewise: the stage, "" if there is nothing to say, and a death that explains its end
WORD_BYTES = 1000  # of it, written by one call: a driver that is killed leaves the last word or this one

TICK_S = 0.25  # between two looks for new processes; deaths of known ones are seen at once
LAST_RESORT_S = 25.0  # for which the driver may stay in a stage that cannot end
SWEEP_S = 20.0  # for killing processes
RESTART_S = 1.0  # between two starts of a process beside

LONGEST_BASE = 20
"""Longest path of the parent of temporary folders: a socket's path has at most 107 characters, Ray's names 80."""

_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from gtpo_megatron.orchestration.run_supervisor import main; main()"
)


def is_supervisor(command: Sequence[str]) -> bool:
    """Whether this is the command line of a process beside a driver."""
    return _BOOTSTRAP in command


def make_run_temp(run: dict[str, Any]) -> Path:
    """Creates a private temporary folder for sockets, Ray's session and temporary files of libraries.

    Args:
        run: what the process beside has to know.

    Raises:
        WorkerError: it cannot be written.
    """
    base = tempfile.gettempdir()
    base = base if len(base) <= LONGEST_BASE else "/tmp"
    try:
        folder = Path(tempfile.mkdtemp(prefix="gtpo-", dir=base))
        (folder / RUN_FILE).write_text(json.dumps(run), encoding="utf-8")
    except OSError as error:
        raise WorkerError(
            f"the temporary folder {base} cannot be written: {error.strerror}; make room there, or set another TMPDIR"
        ) from error
    return folder


class RunSupervisor(Family):
    """Observes the processes of this run, and cleans up after it.

    Args:
        run_folder: where the end is recorded if the driver cannot; None: nowhere.
        sweeps_driver: at the end, end all children and remove shared memory of this process, which has an engine.

    Attributes:
        temp_folder: temporary folder of the run.
    """

    def __init__(self, run_folder: Path | None, *, sweeps_driver: bool = False) -> None:
        children = sorted(process_tree.descendants(os.getpid()))
        super().__init__(os.getpid(), children)
        self._shared_before = sorted(process_tree.shared_files())
        run = {"driver": os.getpid(), "children": children, "shared": self._shared_before}
        self.temp_folder = make_run_temp(run | {"run_folder": run_folder and str(run_folder)})
        self._run_folder = run_folder
        self._sweeps_driver = sweeps_driver
        self._word_file = os.open(self.temp_folder / WORD_FILE, os.O_WRONLY | os.O_CREAT, 0o600)
        self._word = {"stage": "", "death": ""}
        self._broken: Death | None = None
        self._broken_at = self._restart_at = 0.0
        self._has_ended = False
        self._beside = self._start()
        threading.Thread(target=self._observe, name="run supervisor", daemon=True).start()

    def stage(self, name: str) -> None:
        """Sets the stage of the run, in which processes end or stop from now on."""
        super().stage(name)
        self._leave_word()

    def check(self) -> None:
        """Checks for deaths; called repeatedly while waiting for processes.

        Raises:
            WorkerError: a process died, so that the wait cannot end.
        """
        if (broken := self._broken) is not None:
            raise WorkerError(broken.line)

    def cause(self) -> Death | None:
        """The death that explains why a stage has failed, if one was seen."""
        self._broken_at = time.monotonic()  # the driver is leaving the stage
        return super().cause()

    def closing(self) -> None:
        """Announces that all may end from now on."""
        super().closing()
        self._broken = None
        self._leave_word()

    def end(self) -> None:
        """Ends the run's remaining processes except this one, and cleans up."""
        with self._lock:
            if not self._has_ended:
                self._has_ended = True
                _sweep(self, self.temp_folder, self._shared_before, is_all=self._sweeps_driver)
                os.close(self._word_file)
                self._beside.kill()
                self._beside.wait()

    def _start(self) -> "subprocess.Popen[bytes]":
        beside = subprocess.Popen(
            [sys.executable, "-c", _BOOTSTRAP, json.dumps([str(entry) for entry in sys.path]), str(self.temp_folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the driver; it computes nothing, and is heard on a busy machine
        )
        self._spared = {os.getpid(), beside.pid}
        return beside

    def _observe(self) -> None:
        while True:
            self.wait(TICK_S)
            with self._lock:
                if self._has_ended:
                    return
                for step in (self.look, self._restart, self._leave_word, self._judge):
                    with contextlib.suppress(OSError):  # descriptors or memory have run out: it looks again
                        step()

    def _restart(self) -> None:
        """Starts another process beside in place of one that was killed."""
        if self._beside.poll() is not None and time.monotonic() > self._restart_at:
            self._restart_at = time.monotonic() + RESTART_S
            logger.warning("the process %d beside this run is gone; another one takes its place", self._beside.pid)
            self._beside = self._start()

    def _leave_word(self) -> None:
        """Leaves word of the stage, and of the death that would explain the end of the driver."""
        with self._lock, contextlib.suppress(OSError, ValueError):  # a full disk, a log that nobody reads
            before, death = self._word, str(named_death(self.seen()) or "")
            self._word = {"stage": "" if self._is_closing else self._stage, "death": death}
            if self._word != before and not self._has_ended:
                os.pwrite(self._word_file, json.dumps(self._word).ljust(WORD_BYTES).encode(), 0)
            if death not in ("", before["death"]):
                logger.warning("%s", death)

    def _judge(self) -> None:
        """Notes a death after which no stage can end, and ends the driver if it hangs."""
        seen, now = self.seen(), time.monotonic()
        is_broken = any(death.patience_s is not None and now - death.at >= death.patience_s for death in seen)
        if is_broken and self._broken is None:
            self._broken_at = now
        self._broken = named_death(seen) if is_broken else None
        if self._broken is not None and now - self._broken_at > LAST_RESORT_S:
            line = f"WorkerError: {self._broken.line}"
            self.closing()  # so that the process beside, which cleans up, need not say why
            try:
                with contextlib.suppress(OSError, ValueError):  # a log that nobody reads
                    logger.error("%s", line)
                _say_end(os.getpid(), self._run_folder, line)
            finally:
                os._exit(1)  # immediately, because cleanup would wait for dead processes


@contextmanager
def swept_process() -> Iterator[None]:
    """A temporary folder for the block; it and shared memory are removed when the block or the process ends.

    For an engine in this process, whose children end with it.
    """
    supervisor = RunSupervisor(None, sweeps_driver=True)
    before = tempfile.gettempdir()
    tempfile.tempdir = os.environ["TMPDIR"] = str(supervisor.temp_folder)
    try:
        yield
    finally:
        tempfile.tempdir = os.environ["TMPDIR"] = before
        supervisor.closing()
        supervisor.end()


def _sweep(family: Family, folder: Path, shared_before: Sequence[str], *, is_all: bool) -> None:
    """Ends a run's processes, and removes its temporary folder and what is new in shared memory.

    With ``is_all`` all children of the driver end, and what it has mapped itself goes.
    """
    process_tree.end_all(lambda: family.left(folder, with_unnamed=is_all), within_s=SWEEP_S)
    process_tree.remove_unused_shared(shared_before, of={os.getpid()} if is_all else ())
    shutil.rmtree(folder, ignore_errors=True)


def _say_end(driver: int, run_folder: Path | None, line: str) -> None:
    """Records how the run ended, unless its driver has, and prints it; an error must not prevent the cleanup."""
    if run_folder is not None:
        with contextlib.suppress(DataError):  # a damaged record is left as it is
            state = run_state.read_state(run_folder)
            if state is not None and state.pid == driver and not state.outcome:
                run_state.record_end(run_folder, line)
    with contextlib.suppress(OSError, ValueError):  # the reader is gone, or it is closed
        sys.stderr.write(f"gtpo-megatron: {line}\n")
        sys.stderr.flush()


def main() -> None:
    """Entry point of the process beside; its last argument is the run's temporary folder."""
    folder = Path(sys.argv[2])
    try:
        run = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:  # the run has ended before this process was up
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # signals are handled by the driver
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # one descriptor for each process of the run
    driver = run["driver"]
    family = Family(driver, run["children"])
    while True:
        with contextlib.suppress(OSError):  # as in the thread
            stat = process_tree.process_stat(driver)
            if stat is None or stat.has_ended or os.getppid() != driver:
                break  # deaths after its own are not what it ended with
            family.look()
        family.wait(TICK_S)
    with contextlib.suppress(OSError, ValueError):  # the driver did not get so far as to leave word
        word = json.loads((folder / WORD_FILE).read_text(encoding="utf-8"))
        death = named_death(family.seen())
        cause = word["death"] or (death and replace(death, stage=word["stage"]))
        if word["stage"] and cause:
            line = f"WorkerError: {cause}; the driver ended with it; --resume goes on from the last checkpoint"
            _say_end(driver, run["run_folder"] and Path(run["run_folder"]), line)
    _sweep(family, folder, run["shared"], is_all=True)
