"""Reads ``/proc``; no function raises if a process has just ended."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
SHARED_MEMORY = Path("/dev/shm")

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


def _read(pid: int, name: str) -> bytes | None:
    try:
        return (PROC / str(pid) / name).read_bytes()
    except OSError:
        return None
