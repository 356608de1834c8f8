"""The processes of a run on this machine, and which of them have ended."""

import contextlib
import os
import select
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from gtpo_megatron.supervision import process_tree
from gtpo_megatron.supervision.deaths import RAY, Death, how_ended, is_of, name_of, named_death
from gtpo_megatron.supervision.process_tree import ProcessStat, process_ids, process_stat


@dataclass(slots=True)
class _WatchedProcess:
    """A process of the run."""

    stat: ProcessStat  # at the first look
    descriptor: int  # pidfd, readable when it has ended
    name: str = ""  # in messages
    is_of_run: bool = False  # it or an ancestor has a name; other children of the driver may be a logger's


class ProcessWatch:
    """Observes the processes of a run: what this process, the driver, has started since, named ones, and what is below.

    Only the methods without ``_`` may be called from several threads.

    Args:
        earlier: process ids of the driver's children from before the run.
    """

    def __init__(self, earlier: Collection[int]) -> None:
        self._lock = threading.RLock()
        self._driver = os.getpid()
        self._spared = {self._driver}
        self._others = set(earlier)
        self._processes: dict[int, _WatchedProcess] = {}
        self._names: dict[int, str] = {}
        self._expected: set[str] = set()
        self._deaths: list[Death] = []
        self._is_closing = False
        self._stage = "start"
        self._ends = select.epoll()

    def wait(self, seconds: float) -> None:
        """Waits until a process ends, or so long."""
        self._ends.poll(seconds)

    def stage(self, name: str) -> None:
        """Sets the stage of the run, in which processes end from now on."""
        with self._lock:
            with contextlib.suppress(OSError):  # as in `look`
                self._note_ends()
            self._stage = name

    def knows(self, name: str, pid: int) -> None:
        """Names a process of this machine; it replaces an earlier one of the name, whose death is forgotten."""
        with self._lock, contextlib.suppress(OSError):  # as in `look`
            self._expected.discard(name)
            self._deaths = [death for death in self._deaths if not is_of(death.name, name)]
            self._names = {other: known for other, known in self._names.items() if known != name} | {pid: name}
            self._others.discard(pid)
            if self._is_one(pid):
                self._name(pid)
            elif (stat := process_stat(pid)) is None or stat.has_ended:
                del self._names[pid]  # whoever gets its process id next is a stranger
                self._report(name, pid, how_ended(0))

    def expects(self, name: str) -> None:
        """Announces that the processes of this name will be killed on purpose."""
        with self._lock:
            self._expected.add(name)

    def closing(self) -> None:
        """Announces that all may end from now on."""
        with self._lock:
            self._is_closing = True

    def cause(self) -> Death | None:
        """The death that explains why a stage has failed, if one was seen."""
        with self._lock:
            self._note_ends()
            return named_death(self.seen())

    def seen(self) -> list[Death]:
        """Deaths so far; none once all may end."""
        with self._lock:
            return [] if self._is_closing else list(self._deaths)

    @property
    def has_lost_ray(self) -> bool:
        """Whether Ray's GCS or raylet has died, unless all were ending."""
        return any(death.name in RAY for death in self._deaths)

    def look(self) -> None:
        """Looks for new processes and names.

        Raises:
            OSError: descriptors or memory have run out; it is to be called again.
        """
        with self._lock:
            self._note_ends()  # so that all that are known have their process ids
            pids = process_ids()
            self._others &= pids  # process ids are reused
            for pid in pids:
                self._is_one(pid)
            for pid in self._processes:
                self._name(pid)

    def identities(self) -> dict[int, int]:
        """Start time by process id of those that run, which together identify a process."""
        with self._lock:
            return {pid: one.stat.start_ticks for pid, one in self._processes.items()}

    def left(self, folder: Path, *, with_unnamed: bool) -> set[int]:
        """Those that run, and processes that write below the run's temporary folder or have it as theirs.

        With ``with_unnamed`` also children of the driver that are not known to be the run's.
        """
        self.look()
        ours = {pid for pid, one in self._processes.items() if one.is_of_run or with_unnamed}
        others = process_ids() - ours - self._spared
        return ours | {pid for pid in others if process_tree.belongs_to(pid, folder)}

    def _note_ends(self) -> None:
        ended = {descriptor for descriptor, _ in self._ends.poll(0)}
        for pid, process in [item for item in self._processes.items() if item[1].descriptor in ended]:
            code = 0
            with contextlib.suppress(OSError):  # nobody knows
                stat = process_stat(pid)
                code = stat.exit_code if stat is not None and stat.start_ticks == process.stat.start_ticks else 0
            self._ends.unregister(process.descriptor)
            os.close(process.descriptor)
            del self._processes[pid]
            self._names.pop(pid, None)
            self._report(process.name, pid, how_ended(code))

    def _report(self, name: str, pid: int, how: str) -> None:
        death = Death(name, pid, time.monotonic(), self._stage, how)
        # of those that do not matter, such as a checkpoint's writers, a long run has thousands
        if not name or self._is_closing or death.patience_s is None:
            return
        if not any(is_of(name, expected) for expected in self._expected):
            self._deaths.append(death)

    def _is_one(self, pid: int) -> bool:
        """Whether a process is the run's: it is named, or its parent is the run's or the driver."""
        if pid in self._processes:
            return True
        if pid in self._others or pid in self._spared or (stat := process_stat(pid)) is None or stat.has_ended:
            return False
        # also if the listing of processes, which is not atomic, lacks the parent
        if pid not in self._names and stat.parent != self._driver and not self._is_one(stat.parent):
            self._others.add(pid)
            return False
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return False
        self._processes[pid] = _WatchedProcess(stat, descriptor)
        self._ends.register(descriptor, select.EPOLLIN)
        return True

    def _name(self, pid: int) -> None:
        """Notes the name of a process, which may become another program."""
        process = self._processes[pid]
        parent = self._processes.get(process.stat.parent)
        if pid in self._names:
            process.name = self._names[pid]
        elif command := process_tree.command_line(pid):  # which one that has ended lacks
            process.name = name_of(command, parent.name if parent else "")
        process.is_of_run |= bool(process.name) or (parent is not None and parent.is_of_run)
