"""The supervisor of a run: a thread of the driver finds who has died, a helper process cleans up after the driver.

An error of a stage is often only a consequence of a death, and without Ray's GCS or raylet some calls never return. So
the driver asks who has died when a stage has failed, and while it waits. Deaths on other machines are known from Ray's
errors (``on_ray/collect.py``). The thread keeps a note of the death and the processes. If the driver ends
without having cleaned up, the helper prints the death that is noted, and ends the processes.

Only what belongs to the run is ended: descendants of the driver, named processes and theirs, and processes that write
below the run's temporary folder or use it as theirs. Children that the driver has not named may be a logger's: they
live as long as the driver.
"""

import contextlib
import json
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gtpo_megatron.atomic_file import write_file
from gtpo_megatron.errors import DataError, WorkerError
from gtpo_megatron.run_folder import state as run_state
from gtpo_megatron.supervision import process_tree
from gtpo_megatron.supervision.deaths import Death, named_death
from gtpo_megatron.supervision.process_watch import ProcessWatch

logger = logging.getLogger(__name__)

RUN_FILE = ".run.json"  # in the temporary folder, for the helper: the driver, and what was there before the run
NOTE_FILE = ".note.json"  # likewise: a death that would explain the driver's end, "" if there is none; the processes

TICK_S = 0.25  # between two looks for new processes; deaths of known ones are seen at once
LAST_RESORT_S = 25.0  # for which the driver may stay in a stage that cannot end
SWEEP_S = 20.0  # for killing processes

LONGEST_BASE = 20
"""Longest path of the parent of temporary folders: a socket's path has at most 107 characters, Ray's names 80."""

_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from gtpo_megatron.orchestration.run_supervisor import main; main()"
)


def is_supervisor(command: Sequence[str]) -> bool:
    """Whether this is the command line of a driver's helper."""
    return _BOOTSTRAP in command


def make_run_temp(run: dict[str, Any]) -> Path:
    """Creates a private temporary folder for sockets, Ray's session and temporary files of libraries.

    Args:
        run: facts for the helper.

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


class RunSupervisor(ProcessWatch):
    """Observes the processes of this run, and cleans up after it.

    Args:
        run_folder: folder in which the end is recorded if the driver cannot; None: it is not.
        sweeps_driver: at the end, end all children and remove shared memory of this process, which has an engine.

    Attributes:
        temp_folder: temporary folder of the run.
    """

    def __init__(self, run_folder: Path | None, *, sweeps_driver: bool = False) -> None:
        children = sorted(process_tree.descendants(os.getpid()))
        super().__init__(children)
        self._shared_before = sorted(process_tree.shared_files())
        run = {"driver": os.getpid(), "shared": self._shared_before}
        self.temp_folder = make_run_temp(run | {"run_folder": run_folder and str(run_folder)})
        self._run_folder = run_folder
        self._sweeps_driver = sweeps_driver
        self._note: dict[str, Any] = {}
        self._broken: Death | None = None
        self._broken_at = 0.0
        self._has_ended = False
        self._helper = subprocess.Popen(
            [sys.executable, "-c", _BOOTSTRAP, json.dumps([str(entry) for entry in sys.path]), str(self.temp_folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the driver
        )
        self._spared.add(self._helper.pid)
        threading.Thread(target=self._observe, name="run supervisor", daemon=True).start()

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
        self._write_note()

    def end(self) -> None:
        """Ends the run's remaining processes except this one, and cleans up."""
        with self._lock:
            if not self._has_ended:
                self._has_ended = True
                _sweep(
                    lambda: self.left(self.temp_folder, with_unnamed=self._sweeps_driver),
                    self.temp_folder,
                    self._shared_before,
                    with_own_memory=self._sweeps_driver,
                )
                self._helper.kill()
                self._helper.wait()

    def _observe(self) -> None:
        while True:
            self.wait(TICK_S)
            with self._lock:
                if self._has_ended:
                    return
                for step in (self.look, self._write_note, self._judge):
                    with contextlib.suppress(OSError):  # descriptors or memory have run out: it looks again
                        step()

    def _write_note(self) -> None:
        """Notes for the helper what it has to say and to end."""
        with self._lock, contextlib.suppress(OSError, ValueError):  # a full disk, a log that nobody reads
            before, death = self._note, str(named_death(self.seen()) or "")
            self._note = {"death": death, "processes": self.identities()}
            if death not in ("", before.get("death")):
                logger.warning("%s", death)
            if self._note != before and not self._has_ended:
                write_file(self.temp_folder / NOTE_FILE, json.dumps(self._note))

    def _judge(self) -> None:
        """Notes a death after which no stage can end, and ends the driver if it hangs."""
        seen, now = self.seen(), time.monotonic()
        is_broken = any(death.patience_s is not None and now - death.at >= death.patience_s for death in seen)
        if is_broken and self._broken is None:
            self._broken_at = now
        self._broken = named_death(seen) if is_broken else None
        if self._broken is not None and now - self._broken_at > LAST_RESORT_S:
            line = f"WorkerError: {self._broken.line}"
            self.closing()  # so that the helper, which cleans up, need not say why
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


def _sweep(
    left: Callable[[], Collection[int]], folder: Path, shared_before: Sequence[str], *, with_own_memory: bool
) -> None:
    """Ends the processes that ``left`` finds, and removes the temporary folder and what is new in shared memory.

    With ``with_own_memory`` also what this process has mapped goes.
    """
    process_tree.end_all(left, within_s=SWEEP_S)
    process_tree.remove_unused_shared(shared_before, of={os.getpid()} if with_own_memory else ())
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
    """Entry point of the helper; its last argument is the run's temporary folder."""
    folder = Path(sys.argv[2])
    try:
        run = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:  # the run has ended before this process was up
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # signals are handled by the driver
    _wait_for_end(run["driver"])
    note: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):  # the driver did not get so far, or its disk was full
        note = json.loads((folder / NOTE_FILE).read_text(encoding="utf-8"))
    if note.get("death"):
        line = f"WorkerError: {note['death']}; the driver ended with it; --resume goes on from the last checkpoint"
        _say_end(run["driver"], run["run_folder"] and Path(run["run_folder"]), line)
    identities = {int(pid): start_ticks for pid, start_ticks in note.get("processes", {}).items()}
    _sweep(lambda: _orphans(identities, folder), folder, run["shared"], with_own_memory=False)


def _wait_for_end(driver: int) -> None:
    """Waits until this process's parent, the driver, has ended."""
    with contextlib.suppress(ProcessLookupError):
        poll = select.poll()
        poll.register(os.pidfd_open(driver), select.POLLIN)
        while os.getppid() == driver and not poll.poll(1000):
            pass


def _orphans(identities: Mapping[int, int], folder: Path) -> set[int]:
    """What runs of a driver that is gone: noted processes, what is below them, and what uses the temporary folder."""
    stats = {pid: process_tree.process_stat(pid) for pid in identities}
    noted = [pid for pid, stat in stats.items() if stat is not None and stat.start_ticks == identities[pid]]
    living = {pid for pid in noted if (stat := stats[pid]) is not None and not stat.has_ended}
    ours = living | set(process_tree.descendants(*noted))
    others = process_tree.process_ids() - ours - {os.getpid()}
    return ours | {pid for pid in others if process_tree.belongs_to(pid, folder)}
