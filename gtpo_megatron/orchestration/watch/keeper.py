"""The keeper, a small process beside every run: observes the ends of the run's processes, and cleans up after it.

The driver starts it, and it outlives the driver, so a killed driver is cleaned up after too. It imports little, to
start fast. Its input is lines of JSON: ``{"name": ..., "pid": ...}`` names a process, ``{"stage": ...}`` sets the
stage, ``{"expect": name}`` announces an intended end, ``{"closing": true}`` the end of all, ``{"ask": number}``
requests ``{"answer": number}`` after all observations so far, and ``{"end": true}`` ends it. Its output is the deaths.

It cleans up only what belongs to the run: descendants of the driver, named processes and their descendants, and
processes that write below the run's temporary folder or use it as theirs; files in ``/dev/shm`` that one of these had
mapped, or made just before it ended (``_unmapped``); and the temporary folder.
"""

import argparse
import contextlib
import json
import os
import resource
import select
import shutil
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gtpo_megatron.errors import DataError
from gtpo_megatron.orchestration.watch.deaths import Death, first_death, how_ended, is_of
from gtpo_megatron.orchestration.watch.process_names import name_of_child, name_of_ray
from gtpo_megatron.proc_files import (
    SHARED_MEMORY,
    ProcessStat,
    belongs_to,
    command_line,
    mapped_shared,
    process_ids,
    process_stat,
    shared_files,
)
from gtpo_megatron.run_folder import state as run_state

BEFORE_FILE = ".before.json"
"""In the temporary folder: the driver's ``children`` and the names of ``shared`` memory before the run."""
OWNED_FILE = ".shared_memory"
"""In the temporary folder, one name per line: shared memory of the run, for a keeper that takes over."""

TICK_S = 0.05
"""Between two scans of processes and shared memory; deaths are seen at once."""
NAMES_EVERY_S = 0.5
"""Between two readings of the processes' titles and states."""
OWNER_LOOKS = 20
"""Scans after which a new file in shared memory that no process of the run has mapped is not the run's."""
SWEEP_S = 20.0
"""Longest time for killing processes."""
ALWAYS_MAPPED = ("psm_", "gtpo_megatron_")
"""Beginnings of names of files that somebody has mapped for as long as they are of use: Python's shared memory, which
holds vLLM's queues, and the slots of pushes. A data set that somebody copies to ``/dev/shm`` is mapped by nobody."""
STOPPED_LOOKS = 4
"""Readings after which a process counts as stopped: two seconds, for debuggers and shells."""


@dataclass(slots=True)
class _Member:
    """A process of the run.

    Attributes:
        pid: its process id.
        start_ticks: start time, which identifies it together with the id.
        parent: its parent's process id.
        descriptor: pidfd, readable when it has ended.
        name: its name in messages; may be empty.
        is_final: the driver gave the name, or it is one of Ray's processes.
        is_of_run: it or an ancestor has such a name; other children of the driver may belong to a logger.
        stopped_looks: number of consecutive readings in which it was stopped.
        stopped_at: time of the first of them.
        stopped_in: stage at that time.
    """

    pid: int
    start_ticks: int
    parent: int
    descriptor: int
    name: str = ""
    is_final: bool = False
    is_of_run: bool = False
    stopped_looks: int = 0
    stopped_at: float = 0.0
    stopped_in: str = ""


class RunKeeper:
    """Observes the processes of a run, and cleans up after it.

    Args:
        driver: the driver's process id.
        folder: temporary folder of the run, removed at the end; it has ``BEFORE_FILE``.
        is_driver_swept: also remove shared memory of the driver itself at the end.
        run_folder: where the cause is recorded if the driver could not.
    """

    def __init__(
        self,
        driver: int,
        folder: Path,
        run_folder: Path | None,
        *,
        is_driver_swept: bool = False,
    ) -> None:
        self._driver = driver
        self._is_driver_swept = is_driver_swept
        self._folder = folder
        self._run_folder = run_folder
        self._members: dict[int, _Member] = {}
        before = json.loads((folder / BEFORE_FILE).read_text(encoding="utf-8"))
        self._foreign: set[int] = set(before["children"])
        self._told: dict[int, str] = {}
        self._pids: dict[str, int] = {}
        self._expected: set[str] = set()
        self._deaths: list[Death] = []
        self._stage = "start"
        self._stages_since_look = [self._stage]
        self._stages_since_names = [self._stage]
        self._names_at = 0.0
        self._shared_seen: dict[str, int] = dict.fromkeys(before["shared"], OWNER_LOOKS)
        self._shared_owned = _lines(folder / OWNED_FILE)
        self._shared_orphaned: set[str] = set()
        self._has_seen_end = False
        self._poll = select.poll()
        self._by_descriptor: dict[int, _Member] = {}
        self._input = b""
        self._is_closing = False
        self._has_ended = False
        driver_stat = process_stat(driver)
        self._driver_ticks = driver_stat.start_ticks if driver_stat else -1
        self._is_driver_stopped = False
        self._num_before_driver = 0

    def run(self) -> None:
        """Runs until the driver ends it or is gone."""
        stdin = sys.stdin.fileno()
        os.set_blocking(stdin, False)
        self._poll.register(stdin, select.POLLIN)
        while not self._has_ended and self._driver_lives():
            ready = {descriptor for descriptor, _ in self._poll.poll(TICK_S * 1000)}
            self._stages_since_look = [self._stage]
            if stdin in ready:
                self._listen(stdin)  # first, since it may announce intended ends
            is_before = self._driver_lives()
            self._note_ends(ready)
            if is_before:
                self._num_before_driver = len(self._deaths)
            with contextlib.suppress(OSError):  # descriptors or memory have run out: it looks again at the next tick
                self._look()
        if not self._has_ended:
            self._note_ends({descriptor for descriptor, _ in self._poll.poll(0)})
            self._speak_for_driver()
        self.sweep()

    # ------------------------------------------------------------------------------------------------------- watching
    def _look(self) -> None:
        fresh = process_ids() - self._members.keys() - self._foreign
        while fresh:
            self._meet(min(fresh), fresh)
        if time.monotonic() - self._names_at > NAMES_EVERY_S:
            self._names_at = time.monotonic()
            self._foreign &= process_ids()  # process ids are reused
            for member in list(self._members.values()):
                self._look_at(member)
            self._stages_since_names = [self._stage]
        self._look_at_shared_memory()

    def _meet(self, pid: int, fresh: set[int]) -> None:
        """Adds a new process, after its parent; it is the run's if its parent is."""
        fresh.discard(pid)
        stat = process_stat(pid)
        if stat is None or pid == os.getpid():
            return
        if stat.parent not in self._members and stat.parent not in self._foreign and stat.parent != self._driver:
            self._meet(stat.parent, fresh)  # also if the listing of processes, which is not atomic, lacks the parent
        if stat.parent not in self._members and stat.parent != self._driver and pid not in self._told:
            self._foreign.add(pid)
            return
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            return
        member = _Member(pid=pid, start_ticks=stat.start_ticks, parent=stat.parent, descriptor=descriptor)
        self._members[pid] = self._by_descriptor[descriptor] = member
        self._poll.register(descriptor, select.POLLIN)
        self._look_at(member)

    def _look_at(self, member: _Member) -> None:
        self._name(member)
        stat = process_stat(member.pid)
        if stat is None:
            return
        if not stat.is_stopped or self._is_driver_stopped:
            if member.stopped_looks >= STOPPED_LOOKS:
                self._say({"continued": member.pid})
                self._deaths = [death for death in self._deaths if not (death.is_stop and death.pid == member.pid)]
            member.stopped_looks = 0
            return
        member.stopped_looks += 1
        if member.stopped_looks == 1:
            # as of an end: it may have been stopped in any stage since it was last looked at
            stages = " or ".join(dict.fromkeys(self._stages_since_names))
            member.stopped_at, member.stopped_in = time.monotonic(), stages
        if member.stopped_looks == STOPPED_LOOKS:
            self._report(member, "is stopped (SIGSTOP)", at=member.stopped_at, stopped_in=member.stopped_in)

    def _name(self, member: _Member) -> None:
        if member.pid in self._told:
            member.name, member.is_final = self._told[member.pid], True
        parent = self._members.get(member.parent)
        member.is_of_run |= member.is_final or (parent is not None and parent.is_of_run)
        if member.is_final:
            return
        command = command_line(member.pid)
        name = name_of_ray(command)
        if name and parent is not None and (parent.name == name or command_line(parent.pid) == command):
            return  # forked by that process, and about to become another program: it is looked at again
        if name:
            member.name, member.is_final, member.is_of_run = name, True, True
        elif parent is not None:
            member.name = name_of_child(parent.name, command) or member.name

    def _note_ends(self, ready: set[int]) -> None:
        now = time.monotonic()  # of all alike: which of them came first cannot be known
        for descriptor in ready & self._by_descriptor.keys():
            self._note_end(self._by_descriptor[descriptor], at=now)

    def _note_end(self, member: _Member, *, at: float) -> None:
        stat = _stat_if_known(member.pid)
        code = stat.exit_code if stat is not None and stat.start_ticks == member.start_ticks else 0
        self._poll.unregister(member.descriptor)
        os.close(member.descriptor)
        del self._by_descriptor[member.descriptor]
        del self._members[member.pid]
        self._has_seen_end = True
        self._told.pop(member.pid, None)  # whoever gets its process id next is a stranger
        self._foreign.add(member.pid)  # so that a zombie is not added again
        if member.name and not any(is_of(member.name, name) for name in self._expected):
            self._report(member, how_ended(code), at=at)

    def _report(self, member: _Member, how: str, *, at: float, stopped_in: str = "") -> None:
        was_replaced = self._pids.get(member.name, member.pid) != member.pid
        if member.name and not was_replaced:
            self._say_death(member.name, member.pid, how, at=at, stopped_in=stopped_in)

    def _say_death(self, name: str, pid: int, how: str, *, at: float, stopped_in: str = "") -> None:
        if not self._is_closing:
            # a busy machine keeps this process from looking: the end may have come in any stage since it last did
            stage = stopped_in or " or ".join(dict.fromkeys(self._stages_since_look))
            death = Death(name=name, pid=pid, at=at, stage=stage, how=how, is_stop=bool(stopped_in))
            self._deaths.append(death)
            self._say({"death": asdict(death)})

    def _look_at_shared_memory(self) -> None:
        """Records the owners of new files while they live."""
        there = shared_files().keys()
        self._shared_seen = {name: looks for name, looks in self._shared_seen.items() if name in there}
        self._shared_owned &= there
        fresh = {name for name in there if self._shared_seen.get(name, 0) < OWNER_LOOKS} - self._shared_owned
        if fresh:
            self._claim(fresh)
            for name in fresh:
                self._shared_seen[name] = self._shared_seen.get(name, 0) + 1
        if self._has_seen_end:
            self._has_seen_end = False
            self._shared_orphaned |= _unmapped(fresh - self._shared_owned)

    def _claim(self, names: set[str]) -> None:
        mapped = set().union(*(mapped_shared(pid) for pid in (self._driver, *self._members)))
        found = {name for name, inode in shared_files().items() if inode in mapped} & names
        if found:
            self._shared_owned |= found
            try:
                with (self._folder / OWNED_FILE).open("a", encoding="utf-8") as file:
                    file.writelines(f"{name}\n" for name in found)
            except OSError:  # a full disk: this keeper still has them in memory
                return

    def _driver_lives(self) -> bool:
        try:
            stat = process_stat(self._driver)
        except OSError:  # nobody knows; it is looked at again before the run's processes are ended
            return True
        if stat is None or stat.has_ended or stat.start_ticks != self._driver_ticks:
            return False
        self._is_driver_stopped = stat.is_stopped  # a batch system may stop and continue all processes of a job
        return True

    # -------------------------------------------------------------------------------------------- talking to the driver
    def _listen(self, stdin: int) -> None:
        content = os.read(stdin, 1 << 16)
        if not content:  # closed by the driver, which is ending
            self._poll.unregister(stdin)
            return
        *lines, self._input = (self._input + content).split(b"\n")
        for line in lines:
            self._obey(json.loads(line))

    def _obey(self, message: dict[str, Any]) -> None:
        match message:
            case {"name": name, "pid": pid}:
                self._told[pid] = name
                self._pids[name] = pid
                self._expected.discard(name)
                self._deaths = [death for death in self._deaths if not is_of(death.name, name)]
                self._foreign.discard(pid)
                with contextlib.suppress(OSError):  # as in `run`
                    self._meet_told(pid, name)
            case {"stage": stage}:
                self._stage = stage
                self._stages_since_look.append(stage)
                self._stages_since_names.append(stage)
            case {"expect": name}:
                self._expected.add(name)
            case {"closing": _}:
                self._deaths.clear()
                self._is_closing = True
            case {"ask": number}:
                self._note_ends({descriptor for descriptor, _ in self._poll.poll(0)})
                self._say({"answer": number})
            case {"end": _}:
                self._has_ended = True

    def _meet_told(self, pid: int, name: str) -> None:
        if pid in self._members:
            self._name(self._members[pid])
            return
        self._meet(pid, set())
        stat = process_stat(pid)
        if pid not in self._members and (stat is None or stat.has_ended):  # it ended before it was seen
            self._told.pop(pid, None)
            self._say_death(name, pid, how_ended(0), at=time.monotonic())

    def _say(self, message: dict[str, Any]) -> None:
        try:
            sys.stdout.write(json.dumps(message) + "\n")
            sys.stdout.flush()
        except (OSError, ValueError):  # closed by the driver, which is ending
            return

    def _speak_for_driver(self) -> None:
        """Records the cause if the driver ended after one of its processes: Ray ends it in some calls.

        If a signal killed it, Ray's processes die at the same time and are not the cause.
        """
        stat = _stat_if_known(self._driver)
        was_killed = stat is not None and stat.has_ended and stat.exit_code & 0x7F == signal.SIGKILL
        explaining = self._deaths[: self._num_before_driver] if was_killed else self._deaths
        cause = first_death(explaining, now=time.monotonic())
        if cause is None or self._run_folder is None:
            return
        line = f"WorkerError: {cause}; the driver ended with it; --resume goes on from the last checkpoint"
        # an error here must not prevent the cleanup
        with contextlib.suppress(DataError):  # a damaged record is left as it is
            state = run_state.read_state(self._run_folder)
            if state is not None and state.pid == self._driver and not state.outcome:
                run_state.record_end(self._run_folder, line)
        with contextlib.suppress(OSError):  # the reader is gone
            sys.stderr.write(f"gtpo-megatron: {line}\n")
            sys.stderr.flush()

    # ------------------------------------------------------------------------------------------------------- sweeping
    def sweep(self) -> None:
        """Ends the run's remaining processes except the driver, and removes its shared memory and temporary folder."""
        self._look_at_shared_memory()
        deadline = time.monotonic() + SWEEP_S
        is_swept = False
        while not is_swept and time.monotonic() < deadline:
            with contextlib.suppress(OSError):  # as in `run`
                is_swept = not self._kill_left()
            time.sleep(0.0 if is_swept else TICK_S)
        kept = set() if self._is_driver_swept else mapped_shared(self._driver)
        orphaned = _unmapped(self._shared_orphaned)
        for name, inode in shared_files().items():
            if name in orphaned or (name in self._shared_owned and inode not in kept):
                with contextlib.suppress(OSError):  # another user's, or gone: the temporary folder must go all the same
                    (SHARED_MEMORY / name).unlink()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _kill_left(self) -> bool:
        """Kills the run's processes, having noted their shared memory; False if there was none."""
        left = self._left()
        unclaimed = self._unclaimed()
        for pid in left:
            mapped = mapped_shared(pid)
            self._shared_owned |= {name for name, inode in shared_files().items() if inode in mapped} & unclaimed
            _kill(pid)
        return bool(left)

    def _unclaimed(self) -> set[str]:
        """Files that are not known to belong to others."""
        return {name for name in shared_files() if self._shared_seen.get(name, 0) < OWNER_LOOKS}

    def _left(self) -> list[int]:
        """Running processes of the run; without other children of the driver while it lives."""
        is_all_ours = self._is_driver_swept or not self._driver_lives()
        left = []
        for pid in sorted(process_ids() - {os.getpid(), self._driver}):
            stat = process_stat(pid)
            if stat is None or stat.has_ended:
                continue
            member = self._member(pid, stat)
            parent = self._member(stat.parent, process_stat(stat.parent))
            is_ours = member is not None and (member.is_of_run or is_all_ours)
            is_childs = parent is not None and (parent.is_of_run or is_all_ours)
            if is_ours or is_childs or belongs_to(pid, self._folder):
                left.append(pid)
                if member is None:
                    self._members[pid] = _Member(
                        pid=pid, start_ticks=stat.start_ticks, parent=stat.parent, descriptor=-1, is_of_run=True
                    )
        return left

    def _member(self, pid: int, stat: ProcessStat | None) -> _Member | None:
        """The member that this process is; None if the process id has been reused since."""
        member = self._members.get(pid)
        return member if member is not None and stat is not None and member.start_ticks == stat.start_ticks else None


def _lines(path: Path) -> set[str]:
    return set(path.read_text(encoding="utf-8").splitlines()) if path.exists() else set()


def _unmapped(names: set[str]) -> set[str]:
    """Those of the files in shared memory, this user's and of a kind that is ``ALWAYS_MAPPED``, that nobody has mapped.

    New ones are taken for the run's where one of its processes has just ended: it may have made them since the last
    look, and nobody else has a use for them. At the sweep they must still be mapped by nobody.
    """
    names = {name for name in names if name.startswith(ALWAYS_MAPPED) and _is_this_users(SHARED_MEMORY / name)}
    if not names:
        return set()
    mapped = set().union(*(mapped_shared(pid) for pid in process_ids()))
    return {name for name, inode in shared_files().items() if name in names and inode not in mapped}


def _is_this_users(path: Path) -> bool:
    try:
        return path.stat().st_uid == os.geteuid()
    except OSError:
        return False


def _stat_if_known(pid: int) -> ProcessStat | None:
    try:
        return process_stat(pid)
    except OSError:
        return None


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        return


def main() -> None:
    """Entry point; started by :class:`~gtpo_megatron.orchestration.watch.run_watch.RunWatch`."""
    parser = argparse.ArgumentParser(prog="run_keeper")
    parser.add_argument("--driver", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--run-folder", type=Path)
    parser.add_argument("--sweep-driver", action="store_true")
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # signals are handled by the driver
    if not (options.folder / BEFORE_FILE).exists():
        return  # a keeper that was killed at its very end has swept it
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # one descriptor for each process of the run
    RunKeeper(options.driver, options.folder, options.run_folder, is_driver_swept=options.sweep_driver).run()
