"""Who of a run's processes died first, and an end of the run that says so: the driver's side of ``keeper.py``.

A rank's broken collective, a lost object, an engine that cannot be started are consequences as often as causes. So the
keeper notes every process of the run on this machine as it ends, and when a stage fails, :meth:`RunWatch.explained`
looks there first. Without Ray's GCS or raylet some calls never come back, or end the driver: the watch does not wait
for them. Processes on other machines are named by what Ray says (``collect.py``).
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
"""How long a stage may take to say more about a death than that it was one: a rank that raised says why."""

STOPPED_S = 30.0
"""A process that does not run for so long is not waited for: its peers would, for minutes."""

LAST_RESORT_S = 25.0
"""By when the driver must have left the stage that a death has broken; else the watch ends it."""

ANSWER_S = 5.0
SWEEP_S = 30.0
TICK_S = 0.2

LONGEST_BASE = 20
"""Characters of the folder that temporary folders are in. A socket's path has 107 at most, and Ray's names take 80."""

_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "from gtpo_megatron.orchestration.watch.keeper import main; main()"
)


def make_run_temp() -> Path:
    """A folder of the run's own for sockets, Ray's session and what libraries leave lying; only this user sees it.

    It says what was there before the run, for the keeper.

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
    """A keeper and what it has seen.

    Args:
        run_folder: where the end is written down; None: nobody looks there.
        sweeps_driver: at the end, shared memory of this process goes too: an engine has run in it.

    Attributes:
        temp_folder: of the run.
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
        self._ask()  # a death before the keeper is up would have no witness

    def knows(self, name: str, pid: int) -> None:
        """A process of this machine; one that had the name before was replaced, and its death is settled."""
        with self._lock:
            self._names[name] = pid
            self._deaths = [death for death in self._deaths if not is_of(death.name, name)]
        self._tell({"name": name, "pid": pid})

    def stage(self, name: str) -> None:
        """What the run does from now on."""
        if name != self._stage:
            self._stage = name
            self._tell({"stage": name})

    def expects(self, name: str) -> None:
        """This process will be killed, on purpose."""
        self._tell({"expect": name})

    @property
    def has_lost_ray(self) -> bool:
        """Whether nothing can be asked of Ray any more."""
        with self._lock:
            return any(death.name in RAY for death in self._deaths)

    def check(self) -> None:
        """Whoever waits for processes asks this between two looks.

        Raises:
            WorkerError: what is waited for will not come.
        """
        if (cause := self._broken()) is not None:
            raise self._error(cause, None)

    def explained(self, error: Exception) -> Exception:
        """The error that the run ends with: who died first where that is not who the error names.

        Args:
            error: that a stage has raised.
        """
        self._ask()
        with self._lock:
            cause = first_death(self._deaths, now=time.monotonic())
            self._has_explained = True
        if cause is None or str(error).startswith(str(cause)):
            return error
        if isinstance(error, GTPOError):
            named = _named(str(error))
            is_same = named == {cause.name} and f" died in {cause.stage}" in str(error)
            if is_same or (cause.name in named and "exit status" in cause.how):
                return error
        return self._error(cause, error)

    def closing(self) -> None:
        """All that end from now on do so because the run does."""
        self._is_closing = True
        self._tell({"closing": True})
        with self._lock:
            stopped = [death for death in self._deaths if death.is_stop]
            self._deaths = [death for death in self._deaths if not death.is_stop]
        for death in stopped:  # it cannot be asked to end otherwise
            with contextlib.suppress(ProcessLookupError):
                os.kill(death.pid, signal.SIGCONT)

    def end(self) -> None:
        """Ends what is left of the run's processes but for this one, and removes what they left."""
        with self._lock:
            if self._is_ending:
                return
            self._is_ending = True
        for _ in range(2):  # a keeper that was killed leaves its work to another one
            self._tell({"end": True})
            try:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._keeper.pid, signal.SIGCONT)  # somebody may have stopped it
                status = self._keeper.wait(SWEEP_S)
            except subprocess.TimeoutExpired:
                logger.warning("%s is not swept after %.0f s; its keeper goes on", self.temp_folder, SWEEP_S)
                return
            self._close_pipes()
            if status == 0:
                return
            self._keeper = self._start()

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
            bufsize=0,  # a message goes out whole or not at all
            start_new_session=True,  # Ctrl-C is for the driver
        )
        assert keeper.stdin is not None
        os.set_blocking(keeper.stdin.fileno(), False)
        return keeper

    def _tell(self, message: dict[str, Any]) -> None:
        """Without waiting: a keeper that somebody has stopped must not stop the run."""
        keeper = self._keeper
        try:
            assert keeper.stdin is not None
            if keeper.stdin.write(json.dumps(message).encode() + b"\n") is None:  # the pipe is full
                os.kill(keeper.pid, signal.SIGCONT)
        except (OSError, ValueError):
            logger.debug("the keeper of this run is gone")  # the thread that reads starts another one

    def _close_pipes(self) -> None:
        for pipe in (self._keeper.stdin, self._keeper.stdout):
            with contextlib.suppress(OSError):  # what was not written yet is for nobody
                assert pipe is not None
                pipe.close()

    def _ask(self) -> None:
        """Returns when everything that has happened so far is known."""
        with self._has_news:
            self._asked += 1
            number = self._asked
        self._tell({"ask": number})
        with self._has_news:
            self._has_news.wait_for(lambda: self._answered >= number, ANSWER_S)

    def _read(self) -> None:
        while True:
            assert self._keeper.stdout is not None
            for line in self._keeper.stdout:
                self._hear(json.loads(line))
            self._keeper.wait()
            with self._lock:
                if self._is_ending:
                    return
            logger.warning("the keeper of this run (process %d) is gone; a new one takes over", self._keeper.pid)
            self._close_pipes()
            self._keeper = self._start()
            for name, pid in list(self._names.items()):
                self._tell({"name": name, "pid": pid})
            self._tell({"stage": self._stage})

    def _hear(self, message: dict[str, Any]) -> None:
        with self._has_news:
            match message:
                case {"death": death} if not self._is_closing:
                    found = Death(**death)
                    self._deaths.append(found)
                    if is_essential(found) or found.name in AGENTS:
                        logger.warning("%s", found)
                case {"continued": pid}:
                    self._deaths = [death for death in self._deaths if not (death.is_stop and death.pid == pid)]
                case {"answer": number}:
                    self._answered = number
            self._has_news.notify_all()

    def _broken(self) -> Death | None:
        """A death after which no stage can end, if its time has come."""
        now = time.monotonic()
        with self._lock:
            cause = first_death(self._deaths, now=now)
            is_broken = any(is_essential(death) and now - death.at >= _patience_s(death) for death in self._deaths)
        return cause if is_broken else None

    def _guard(self) -> None:
        """Ends a driver that a death has left hanging."""
        since = math.inf
        while not self._is_ending:
            time.sleep(TICK_S)
            cause = self._broken()
            since = math.inf if cause is None else min(since, time.monotonic())
            if cause is not None and time.monotonic() - since > LAST_RESORT_S:
                self._end_driver(cause)

    def _end_driver(self, cause: Death) -> None:
        error = self._error(cause, None)
        self.closing()  # the keeper has nothing to add
        try:
            if not self._has_explained:
                line = f"{type(error).__name__}: {error}"
                logger.error("%s", line)
                if self._run_folder is not None:
                    run_state.record_end(self._run_folder, line)
                sys.stderr.write(f"gtpo-megatron: {line}\n")
                sys.stderr.flush()
        finally:  # though nobody reads the line
            os._exit(1)  # at once: what would be tidied up waits for what is dead; the keeper sweeps

    def _error(self, cause: Death, error: Exception | None) -> WorkerError:
        why = "" if cause.is_stop else ", and the system log for an out-of-memory kill"
        first = "" if error is None else f"; what came of it: {last_line(str(error))}"
        return WorkerError(f"{cause}; see log.txt{why}; --resume goes on from the last checkpoint{first}")


def _patience_s(death: Death) -> float:
    """How long a stage may go on after it; for ever where an engine is to be replaced."""
    if death.is_stop:
        return STOPPED_S
    if death.name.startswith(("rollout engine", "worker ")):
        return math.inf
    return 0.0 if death.name in RAY else OWN_WORDS_S


def _named(text: str) -> set[str]:
    """Processes that an error names as dead, in its first words."""
    before, died, _ = text.partition(" died in ")
    names = re.sub(r" \([^)]*\)", "", before).split(",")  # without their places in the layout
    return {name.strip() for name in names} if died else set()
