"""Reads ``/proc``, and the limits of control groups; no function raises if a process has just ended."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
SHARED_MEMORY = Path("/dev/shm")
CGROUPS = Path("/sys/fs/cgroup")

_MAPPED = re.compile(rb" (\d+) +/dev/shm/", re.MULTILINE)
"""Inode number of a mapped file; a semaphore is mapped under another name than its final one."""

_FLAGS = re.compile(rb"^flags:\s+0*([0-7]+)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessStat:
    """A line of ``/proc/PID/stat``.

    Attributes:
        parent: process id of the parent.
        state: one letter; ``T`` is stopped by a signal, ``Z`` has ended and waits for its parent.
        start_ticks: start time in ticks since boot; with the process id it identifies a process.
        exit_code: as of ``waitpid``; 0 while it runs, and if only its parent can read it.
    """

    parent: int
    state: str
    start_ticks: int
    exit_code: int

    @property
    def has_ended(self) -> bool:
        """Whether it has ended, even if its parent has not waited for it."""
        return self.state in "ZX"

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped it."""
        return self.state == "T"


def process_ids() -> set[int]:
    """Ids of all processes."""
    return {int(name) for name in os.listdir(PROC) if name.isdigit()}  # noqa: PTH208 - faster, called often


def process_stat(pid: int) -> ProcessStat | None:
    """The line of a process; None if there is no such process.

    Raises:
        OSError: nobody knows, since descriptors or memory have run out.
    """
    try:
        content = (PROC / str(pid) / "stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    if not content:
        return None
    fields = content[content.rindex(b")") + 2 :].split()
    return ProcessStat(
        parent=int(fields[1]), state=fields[0].decode(), start_ticks=int(fields[19]), exit_code=int(fields[49])
    )


def command_line(pid: int) -> list[str]:
    """The arguments, or the title that the process has set; may be empty."""
    content = _read(pid, "cmdline") or b""
    return [part.decode("utf-8", "replace") for part in content.rstrip(b"\0").split(b"\0") if part]


def mapped_shared(pid: int) -> set[int]:
    """Inode numbers of the files in ``/dev/shm`` that the process has mapped."""
    return {int(number) for number in _MAPPED.findall(_read(pid, "maps") or b"")}


def shared_files() -> dict[str, int]:
    """Name -> inode number of the files in ``/dev/shm``."""
    try:
        with os.scandir(SHARED_MEMORY) as entries:
            return {entry.name: entry.inode() for entry in entries}
    except OSError:
        return {}


def belongs_to(pid: int, folder: Path) -> bool:
    """Whether the process writes to a file below the folder, or has it as its temporary folder.

    Processes that only read there (such as a pager of a log) are not included.
    """
    prefix = f"{folder}/"
    if any(
        entry.startswith(b"TMPDIR=" + os.fsencode(str(folder))) for entry in (_read(pid, "environ") or b"").split(b"\0")
    ):
        return True
    try:
        numbers = os.listdir(PROC / str(pid) / "fd")  # noqa: PTH208
    except OSError:
        return False
    for number in numbers:
        try:
            target = os.readlink(PROC / str(pid) / "fd" / number)  # noqa: PTH115 - the target may not be a path
        except OSError:
            continue
        if target.startswith(prefix):
            flags = _FLAGS.search(_read(pid, f"fdinfo/{number}") or b"")
            if flags is not None and int(flags[1], 8) & os.O_ACCMODE != os.O_RDONLY:
                return True
    return False


def memory() -> tuple[int, int]:
    """Bytes of memory that this process may use in all, and bytes of them that are free now.

    Of the machine, or of the tightest control group that this process is in (a container's, a batch job's). What the
    system would give back at once, such as cached files, is free.
    """
    lines = (PROC / "meminfo").read_text(encoding="ascii").splitlines()
    kib = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}
    total, free = kib["MemTotal"] << 10, kib["MemAvailable"] << 10
    for limit, used in _control_groups():
        total, free = min(total, limit), min(free, max(0, limit - used))
    return total, free


_GROUP_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Controllers of a line of ``/proc/self/cgroup`` -> files of version 2 or 1, and what is cached, in memory.stat."""


def _control_groups() -> Iterator[tuple[int, int]]:
    """Limit and use of memory of this process's control group and those around it, where there is a limit."""
    try:
        lines = (PROC / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        kind = "memory" if "memory" in controllers.split(",") else controllers
        if kind not in _GROUP_FILES:
            continue
        limit_file, used_file, cached = _GROUP_FILES[kind]
        mounted = CGROUPS / kind
        group = mounted / path.lstrip("/")
        for folder in (group, *group.parents):
            try:
                limit = int((folder / limit_file).read_text(encoding="ascii"))
                used = int((folder / used_file).read_text(encoding="ascii"))
                stat = dict(row.split() for row in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
                yield limit, used - int(stat.get(cached, 0))
            except (OSError, ValueError):  # "max", or a path of another name space
                pass
            if folder == mounted:
                break


def _read(pid: int, name: str) -> bytes | None:
    try:
        return (PROC / str(pid) / name).read_bytes()
    except OSError:
        return None
