"""The driver's side of ``keeper.py``: explains the failure of a stage by the first death of a process.

An error of a stage is often only a consequence of a death. The keeper records the end of every process of the run on
this machine; :meth:`RunWatch.explained` uses these records. Without Ray's GCS or raylet some calls never return, or end
the driver, so the watch does not wait for them. Deaths on other machines are known from Ray's errors (``collect.py``).
"""

import contextlib
import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import psutil

from gtpo_megatron.errors import GTPOError, WorkerError
from gtpo_megatron.orchestration.watch.deaths import AGENTS, RAY, Death, first_death, is_essential, is_of
from gtpo_megatron.orchestration.watch.keeper import BEFORE_FILE
from gtpo_megatron.orchestration.watch.reasons import last_line
from gtpo_megatron.proc_files import shared_files
from gtpo_megatron.run_folder import state as run_state

logger = logging.getLogger(__name__)

OWN_WORDS_S = 8.0
"""How long a stage may take to report a death itself: a rank that raised has the reason."""

STOPPED_S = 30.0
"""How long a process may be stopped before the stage fails; its peers would wait for minutes."""

LAST_RESORT_S = 25.0
"""Time after a death by which the driver must have left the stage; otherwise the watch ends the driver."""

ANSWER_S = 5.0
RESTARTS_S = (0.0, 1.0, 5.0, 30.0)
"""Pauses before the keepers that take over: one that cannot run, for want of memory, is not started all the time."""
SWEEP_S = 30.0
TICK_S = 0.2

LONGEST_BASE = 20
"""Longest path of the parent of temporary folders: a socket's path has at most 107 characters, Ray's names 80."""

_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "from gtpo_megatron.orchestration.watch.keeper import main; main()"
)


def is_keeper(command: Sequence[str]) -> bool:
    """Whether this is the command line of a run's keeper."""
    return _BOOTSTRAP in command


def make_run_temp() -> Path:
    """Creates a private temporary folder for sockets, Ray's session and temporary files of libraries.

    It has ``BEFORE_FILE``, for the keeper.

    Raises:
        WorkerError: it cannot be written.
    """
    base = tempfile.gettempdir()
    base = base if len(base) <= LONGEST_BASE else "/tmp"
    before = {"children": [process.pid for process in psutil.Process().children()], "shared": sorted(shared_files())}
    try:
        folder = Path(tempfile.mkdtemp(prefix="gtpo-", dir=base))
        (folder / BEFORE_FILE).write_text(json.dumps(before), encoding="utf-8")
    except OSError as error:
        raise WorkerError(
            f"the temporary folder {base} cannot be written: {error.strerror}; make room there, or set another TMPDIR"
        ) from error
    return folder


class RunWatch:
    """A keeper process and the deaths that it reported.

    Args:
        run_folder: where the cause of an end is recorded; None: nowhere.
        sweeps_driver: also remove shared memory of this process at the end, for an engine in it.

    Attributes:
        temp_folder: temporary folder of the run.
    """

    def __init__(self, run_folder: Path | None, *, sweeps_driver: bool = False) -> None:
        self.temp_folder = make_run_temp()
        self._run_folder = run_folder
        self._stage = "start"
        self._sweeps_driver = sweeps_driver
        self._lock = threading.Lock()
        self._deaths: list[Death] = []
        self._names: dict[str, int] = {}
        self._answered = 0
        self._asked = 0
        self._has_news = threading.Condition(self._lock)
        self._is_closing = False
        self._is_ending = False
        self._has_explained = False
        self._keeper = self._start()
        self._threads = [
            threading.Thread(target=self._read, name="run watch", daemon=True),
            threading.Thread(target=self._guard, name="run guard", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        self._ask()  # wait until the keeper observes

    def knows(self, name: str, pid: int) -> None:
        """Names a process of this machine; it replaces an earlier one of the name, whose death is forgotten."""
        with self._lock:
            self._names[name] = pid
            self._deaths = [death for death in self._deaths if not is_of(death.name, name)]
        self._tell({"name": name, "pid": pid})

    def stage(self, name: str) -> None:
        """Sets the stage of the run."""
        if name != self._stage:
            self._stage = name
            self._tell({"stage": name})

    def expects(self, name: str) -> None:
        """Announces that this process will be killed on purpose."""
        self._tell({"expect": name})

    @property
    def has_lost_ray(self) -> bool:
        """Whether Ray's GCS or raylet has died."""
        with self._lock:
            return any(death.name in RAY for death in self._deaths)

    def check(self) -> None:
        """Checks for deaths; called repeatedly while waiting for processes.

        Raises:
            WorkerError: a process died, so that the wait cannot end.
        """
        if (cause := self._broken()) is not None:
            raise self._error(cause, None)

    def explained(self, error: Exception) -> Exception:
        """The error to end the run with: the first death, unless the error already names it.

        Args:
            error: the error that a stage raised.
        """
        self._ask()
        with self._lock:
            cause = first_death(self._deaths, now=time.monotonic())
            self._has_explained = True
        if cause is None or str(error).startswith(str(cause)):
            return error
        if isinstance(error, GTPOError):
            named = _named(str(error))
            is_same = named == {cause.name} and any(f" died in {stage}" in str(error) for stage in cause.stages)
            if is_same or (cause.name in named and "exit status" in cause.how):
                return error
        return self._error(cause, error)

    def closing(self) -> None:
        """Announces that all processes may end from now on."""
        self._is_closing = True
        self._tell({"closing": True})
        with self._lock:
            stopped = [death for death in self._deaths if death.is_stop]
            self._deaths = [death for death in self._deaths if not death.is_stop]
        for death in stopped:  # a stopped process cannot end otherwise
            with contextlib.suppress(ProcessLookupError):
                os.kill(death.pid, signal.SIGCONT)

    def end(self) -> None:
        """Ends the run's remaining processes except this one, and cleans up."""
        with self._lock:
            if self._is_ending:
                return
            self._is_ending = True
        for _ in range(2):  # another one takes over if the keeper was killed
            self._tell({"end": True})
            try:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._keeper.pid, signal.SIGCONT)  # in case it is stopped
                status = self._keeper.wait(SWEEP_S)
            except subprocess.TimeoutExpired:
                logger.warning("%s is not swept after %.0f s; its keeper goes on", self.temp_folder, SWEEP_S)
                return
            if status == 0:
                self._close_pipes()
                return
            with self._lock:
                self._take_over()

    # ---------------------------------------------------------------------------------------------------------- inside
    def _start(self) -> "subprocess.Popen[bytes]":
        run_folder = ["--run-folder", str(self._run_folder)] if self._run_folder is not None else []
        keeper = subprocess.Popen(
            [
                *(sys.executable, "-c", _BOOTSTRAP, json.dumps([str(entry) for entry in sys.path])),
                *("--driver", str(os.getpid()), "--folder", str(self.temp_folder), *run_folder),
                *(["--sweep-driver"] if self._sweeps_driver else []),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # unbuffered: a message is written completely or not at all
            start_new_session=True,  # Ctrl-C is for the driver
        )
        assert keeper.stdin is not None
        os.set_blocking(keeper.stdin.fileno(), False)
        return keeper

    def _tell(self, message: dict[str, Any]) -> None:
        """Sends without waiting, since the keeper may be stopped."""
        keeper = self._keeper
        try:
            assert keeper.stdin is not None
            if keeper.stdin.write(json.dumps(message).encode() + b"\n") is None:  # the pipe is full
                os.kill(keeper.pid, signal.SIGCONT)
        except (OSError, ValueError):
            logger.debug("the keeper of this run is gone")  # the reading thread starts another one

    def _close_pipes(self) -> None:
        for pipe in (self._keeper.stdin, self._keeper.stdout):
            with contextlib.suppress(OSError):  # unsent messages are dropped
                assert pipe is not None
                pipe.close()

    def _ask(self) -> None:
        """Waits until the keeper has reported everything up to now."""
        with self._has_news:
            self._asked += 1
            number = self._asked
        self._tell({"ask": number})
        with self._has_news:
            self._has_news.wait_for(lambda: self._answered >= number, ANSWER_S)

    def _take_over(self) -> None:
        """Starts another keeper in place of one that is gone, and tells it what that one knew."""
        self._close_pipes()
        self._keeper = self._start()
        for name, pid in self._names.items():
            self._tell({"name": name, "pid": pid})
        self._tell({"stage": self._stage})

    def _read(self) -> None:
        pauses = chain(RESTARTS_S, repeat(RESTARTS_S[-1]))
        while True:
            assert self._keeper.stdout is not None
            for line in self._keeper.stdout:
                self._hear(json.loads(line))
            self._keeper.wait()
            time.sleep(next(pauses))
            with self._lock:  # from asking whether the run ends to the new keeper, or both would start one
                if self._is_ending:
                    return
                logger.warning("the keeper of this run (process %d) is gone; a new one takes over", self._keeper.pid)
                self._take_over()

    def _hear(self, message: dict[str, Any]) -> None:
        with self._has_news:
            match message:
                case {"death": death} if not self._is_closing:
                    found = Death(**death)
                    self._deaths.append(found)
                    if not found.is_stop and self._names.get(found.name) == found.pid:
                        del self._names[found.name]  # its process id may be a stranger's by the time of a new keeper
                    if is_essential(found) or found.name in AGENTS:
                        logger.warning("%s", found)
                case {"continued": pid}:
                    self._deaths = [death for death in self._deaths if not (death.is_stop and death.pid == pid)]
                case {"answer": number}:
                    self._answered = number
            self._has_news.notify_all()

    def _broken(self) -> Death | None:
        """A death after which no stage can end, once its patience is over."""
        now = time.monotonic()
        with self._lock:
            cause = first_death(self._deaths, now=now)
            is_broken = any(is_essential(death) and now - death.at >= _patience_s(death) for death in self._deaths)
        return cause if is_broken else None

    def _guard(self) -> None:
        """Ends the driver if it hangs after a death."""
        since = math.inf
        while not self._is_ending:
            time.sleep(TICK_S)
            cause = self._broken()
            since = math.inf if cause is None else min(since, time.monotonic())
            if cause is not None and time.monotonic() - since > LAST_RESORT_S:
                self._end_driver(cause)

    def _end_driver(self, cause: Death) -> None:
        error = self._error(cause, None)
        self.closing()  # the keeper need not record the cause
        try:
            if not self._has_explained:
                line = f"{type(error).__name__}: {error}"
                logger.error("%s", line)
                if self._run_folder is not None:
                    run_state.record_end(self._run_folder, line)
                sys.stderr.write(f"gtpo-megatron: {line}\n")
                sys.stderr.flush()
        finally:  # even if the line cannot be written
            os._exit(1)  # immediately, because cleanup would wait for dead processes; the keeper cleans up

    def _error(self, cause: Death, error: Exception | None) -> WorkerError:
        why = "" if cause.is_stop else ", and the system log for an out-of-memory kill"
        first = "" if error is None else f"; what came of it: {last_line(str(error))}"
        return WorkerError(f"{cause}; see log.txt{why}; --resume goes on from the last checkpoint{first}")


def _patience_s(death: Death) -> float:
    """How long a stage may continue after it; infinite if an engine can be replaced."""
    if death.is_stop:
        return STOPPED_S
    if death.name.startswith(("rollout engine", "worker ")):
        return math.inf
    return 0.0 if death.name in RAY else OWN_WORDS_S


def _named(text: str) -> set[str]:
    """Processes that an error names as dead at its start."""
    before, died, _ = text.partition(" died in ")
    names = re.sub(r" \([^)]*\)", "", before).split(",")  # without their coordinates in the layout
    return {name.strip() for name in names} if died else set()
