"""The supervisor of a run: a thread of the driver, which sees who dies, and a process beside it, which outlives it.

An error of a stage is often only a consequence of a death, and without Ray's GCS or raylet some calls never return. So
the thread holds a descriptor of every process of the run on this machine, and the driver asks it when a stage has
failed, and while it waits. Deaths on other machines are known from Ray's errors (``on_ray/collect.py``).

The process beside knows the same processes. Once the driver is gone without having cleaned up, it says why, as far as
the thread has left word, and cleans up. It imports little, to start fast.

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
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from gtpo_megatron.errors import DataError, WorkerError
from gtpo_megatron.run_folder import state as run_state
from gtpo_megatron.supervision.deaths import RAY, Death, named_death
from gtpo_megatron.supervision.family import Family
from gtpo_megatron.supervision.process_tree import (
    descendants,
    end_all,
    process_stat,
    remove_unused_shared,
    shared_files,
)

logger = logging.getLogger(__name__)

BEFORE_FILE = ".before.json"
"""In the temporary folder: the driver's ``children`` and the names of ``shared`` memory before the run."""

WORD_FILE = ".word.json"
"""In the temporary folder, for the process beside: the ``stage``, "" if it has nothing to say, and a ``death``."""

TICK_S = 0.25
"""Between two looks for new processes; deaths of known ones are seen at once."""

LAST_RESORT_S = 25.0
"""How long the driver may stay in a stage that cannot end."""

SWEEP_S = 20.0
"""Longest time for killing processes."""

RESTART_S = 1.0
"""Pause before another process beside takes the place of one that was killed."""

LONGEST_BASE = 20
"""Longest path of the parent of temporary folders: a socket's path has at most 107 characters, Ray's names 80."""

_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "from gtpo_megatron.orchestration.run_supervisor import main; main()"
)


def is_supervisor(command: Sequence[str]) -> bool:
    """Whether this is the command line of a process beside a driver."""
    return _BOOTSTRAP in command


def make_run_temp() -> Path:
    """Creates a private temporary folder for sockets, Ray's session and temporary files of libraries.

    Raises:
        WorkerError: it cannot be written.
    """
    base = tempfile.gettempdir()
    base = base if len(base) <= LONGEST_BASE else "/tmp"
    before = {"children": sorted(descendants(os.getpid())), "shared": sorted(shared_files())}
    try:
        folder = Path(tempfile.mkdtemp(prefix="gtpo-", dir=base))
        (folder / BEFORE_FILE).write_text(json.dumps(before), encoding="utf-8")
    except OSError as error:
        raise WorkerError(
            f"the temporary folder {base} cannot be written: {error.strerror}; make room there, or set another TMPDIR"
        ) from error
    return folder


class RunSupervisor:
    """Observes the processes of this run, and cleans up after it.

    Args:
        run_folder: where the end is recorded if the driver cannot; None: nowhere.
        sweeps_driver: at the end, end all children and remove shared memory of this process, which has an engine.

    Attributes:
        temp_folder: temporary folder of the run.
    """

    def __init__(self, run_folder: Path | None, *, sweeps_driver: bool = False) -> None:
        self.temp_folder = make_run_temp()
        self._run_folder = run_folder
        self._sweeps_driver = sweeps_driver
        before = _read(self.temp_folder / BEFORE_FILE)
        self._shared_before = before["shared"]
        self._family = Family(os.getpid(), before["children"])
        self._lock = threading.RLock()  # of the family
        self._stage = "start"
        self._word = {"stage": "", "death": ""}
        self._broken: Death | None = None
        self._broken_at = 0.0
        self._has_ended = False
        self._beside = self._start()
        threading.Thread(target=self._observe, name="run supervisor", daemon=True).start()

    def knows(self, name: str, pid: int) -> None:
        """Names a process of this machine; it replaces an earlier one of the name, whose death is forgotten."""
        with self._lock:
            self._family.name(name, pid)

    def stage(self, name: str) -> None:
        """Sets the stage of the run."""
        with self._lock:
            self._family.stage(name)
            self._stage = name
            self._leave_word()

    def expects(self, name: str) -> None:
        """Announces that this process will be killed on purpose."""
        with self._lock:
            self._family.expected.add(name)

    @property
    def has_lost_ray(self) -> bool:
        """Whether Ray's GCS or raylet has died, unless all were ending."""
        return any(death.name in RAY for death in self._family.deaths)

    def check(self) -> None:
        """Checks for deaths; called repeatedly while waiting for processes.

        Raises:
            WorkerError: a process died, so that the wait cannot end.
        """
        if (broken := self._broken) is not None:
            raise WorkerError(broken.line)

    def cause(self) -> Death | None:
        """The death that explains why a stage has failed, if one was seen."""
        with self._lock:
            self._family.note_ends()
            self._broken_at = time.monotonic()  # the driver is leaving the stage
            return named_death(self._family.seen())

    def closing(self) -> None:
        """Announces that all processes may end from now on."""
        with self._lock:
            self._family.closing()
            self._broken = None
            self._stage = ""
            self._leave_word()

    def end(self) -> None:
        """Ends the run's remaining processes except this one, and cleans up."""
        with self._lock:
            if self._has_ended:
                return
            self._has_ended = True
            _sweep(self._family, self.temp_folder, self._shared_before, is_all=self._sweeps_driver)
            self._beside.kill()
            self._beside.wait()

    def _start(self) -> "subprocess.Popen[bytes]":
        stat = process_stat(os.getpid())
        assert stat is not None
        told = [os.getpid(), stat.start_ticks, str(self.temp_folder), self._run_folder and str(self._run_folder)]
        beside = subprocess.Popen(
            [sys.executable, "-c", _BOOTSTRAP, json.dumps([str(entry) for entry in sys.path]), json.dumps(told)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the driver; it computes nothing, and is heard on a busy machine
        )
        self._family.spared = {os.getpid(), beside.pid}
        return beside

    # ------------------------------------------------------------------------------------------------------ the thread
    def _observe(self) -> None:
        restart_at = 0.0
        while True:
            self._family.wait(TICK_S)
            with self._lock:
                if self._has_ended:
                    return
                with contextlib.suppress(OSError):  # descriptors or memory have run out: it looks again
                    self._family.look()
                    if self._beside.poll() is not None and time.monotonic() > restart_at:
                        logger.warning("the supervisor of this run (process %d) is gone", self._beside.pid)
                        self._beside = self._start()
                        restart_at = time.monotonic() + RESTART_S
                self._leave_word()
                self._judge()

    def _leave_word(self) -> None:
        """Writes down, for the process beside, the stage and the death that would explain the end of the driver."""
        word = {"stage": self._stage, "death": str(named_death(self._family.seen()) or "")}
        if word["death"] not in ("", self._word["death"]):
            logger.warning("%s", word["death"])
        if word != self._word:
            self._word = word
            with contextlib.suppress(OSError):  # a full disk
                (self.temp_folder / f"{WORD_FILE}.new").write_text(json.dumps(word), encoding="utf-8")
                (self.temp_folder / f"{WORD_FILE}.new").replace(self.temp_folder / WORD_FILE)

    def _judge(self) -> None:
        """Notes a death after which no stage can end, and ends the driver if it hangs."""
        seen, now = self._family.seen(), time.monotonic()
        is_broken = any(death.ends_run and now - death.at >= death.patience_s for death in seen)
        if is_broken and self._broken is None:
            self._broken_at = now
        self._broken = named_death(seen) if is_broken else None
        if self._broken is not None and now - self._broken_at > LAST_RESORT_S:
            self._end_driver(f"WorkerError: {self._broken.line}")

    def _end_driver(self, line: str) -> None:
        """Immediately, because cleanup would wait for dead processes; the process beside cleans up."""
        self.closing()  # so that it need not say why
        try:
            logger.error("%s", line)
            _say_end(os.getpid(), self._run_folder, line)
        finally:
            os._exit(1)


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


def _read(path: Path) -> dict[str, Any]:
    return cast("dict[str, Any]", json.loads(path.read_text(encoding="utf-8")))


def _sweep(family: Family, folder: Path, shared_before: Collection[str], *, is_all: bool) -> None:
    """Ends the run's remaining processes, and removes its shared memory and temporary folder.

    Args:
        family: its processes.
        folder: its temporary folder.
        shared_before: files in shared memory from before the run.
        is_all: all of the driver's children go, and what it has mapped itself.
    """
    end_all(lambda: family.left(folder, with_unnamed=is_all), within_s=SWEEP_S)
    remove_unused_shared(shared_before, of=family.spared if is_all else ())
    shutil.rmtree(folder, ignore_errors=True)


def _say_end(driver: int, run_folder: Path | None, line: str) -> None:
    """Records how the run ended, unless its driver has, and prints it; an error must not prevent the cleanup."""
    with contextlib.suppress(DataError):  # a damaged record is left as it is
        state = run_state.read_state(run_folder) if run_folder is not None else None
        if run_folder is not None and state is not None and state.pid == driver and not state.outcome:
            run_state.record_end(run_folder, line)
    with contextlib.suppress(OSError):  # the reader is gone
        sys.stderr.write(f"gtpo-megatron: {line}\n")
        sys.stderr.flush()


def main() -> None:
    """Entry point of the process beside; its argument is JSON with the driver, its start, and two folders."""
    driver, start, told_folder, run_folder = json.loads(sys.argv[1])
    folder = Path(told_folder)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # signals are handled by the driver
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # one descriptor for each process of the run
    before = _read(folder / BEFORE_FILE)
    family = Family(driver, before["children"])
    while _lives(driver, start):  # deaths after its own are not what it ended with
        with contextlib.suppress(OSError):  # as in the thread
            family.look()
        family.wait(TICK_S)
    with contextlib.suppress(OSError, ValueError):  # it did not get so far as to leave word
        word = _read(folder / WORD_FILE)
        death = named_death(family.seen())
        cause = word["death"] or (death and replace(death, stage=word["stage"]))
        if word["stage"] and cause:
            line = f"WorkerError: {cause}; the driver ended with it; --resume goes on from the last checkpoint"
            _say_end(driver, run_folder and Path(run_folder), line)
    _sweep(family, folder, before["shared"], is_all=True)


def _lives(pid: int, start_ticks: int) -> bool:
    try:
        stat = process_stat(pid)
    except OSError:  # nobody knows
        return True
    return stat is not None and not stat.has_ended and stat.start_ticks == start_ticks
