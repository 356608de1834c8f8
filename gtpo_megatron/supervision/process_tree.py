"""Reads ``/proc`` and ``/dev/shm``, and ends processes; nothing here fails because a process has just ended."""

import contextlib
import os
import re
import signal
import stat
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
SHARED_MEMORY = Path("/dev/shm")
MAPPED_WITHIN_S = 0.2  # of a file's start

# the inode number of a mapped file; a semaphore is mapped under another name than its final one
_MAPPED = re.compile(rb" (\d+) +/dev/shm/", re.MULTILINE)

_ALWAYS_MAPPED = re.compile(
    r"psm_[0-9a-f]+"  # Python's shared memory, which holds vLLM's queues
    r"|gtpo_megatron_.*"  # slots of pushes
    r"|vllm_dist_.*-cpushm_\d+|VLLM_OBJECT_STORAGE_SHM_BUFFER_.*"
    r"|sem\.mp-\w{8}|torch_\d+_\d+_\d+|nccl-\w{6}|__KMP_REGISTERED_LIB_\d+(_\d+)?"
)
"""Names of files that somebody has mapped for as long as they are of use. A data set that somebody copies to
``/dev/shm`` is mapped by nobody, and has none of these names."""


class ProcessStat(NamedTuple):
    """Of ``/proc/PID/stat``."""

    state: str  # one letter; T is stopped by a signal, Z has ended and waits for its parent
    parent: int
    start_ticks: int  # since boot; with the process id it identifies a process
    exit_code: int  # as of waitpid; 0 while it runs, and if only its parent can read it

    @property
    def has_ended(self) -> bool:
        """Whether it has ended, even if its parent has not waited for it."""
        return self.state in "ZX"


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
    return ProcessStat(fields[0].decode(), int(fields[1]), int(fields[19]), int(fields[49]))


def command_line(pid: int) -> list[str]:
    """The arguments, or the title that the process has set; may be empty."""
    return [part.decode("utf-8", "replace") for part in _read(pid, "cmdline").rstrip(b"\0").split(b"\0") if part]


def belongs_to(pid: int, folder: Path) -> bool:
    """Whether the process writes to a file below the folder, or has it as its temporary folder.

    Processes that only read there (such as a pager of a log) are not included.
    """
    if any(entry.startswith(b"TMPDIR=" + os.fsencode(folder)) for entry in _read(pid, "environ").split(b"\0")):
        return True
    with contextlib.suppress(OSError):
        for link in (PROC / str(pid) / "fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                # os.readlink, since the target may not be a path
                if os.readlink(link).startswith(f"{folder}/") and link.lstat().st_mode & stat.S_IWUSR:  # noqa: PTH115
                    return True
    return False


def descendants(*roots: int) -> list[int]:
    """The living processes below ``roots``, children before their own children."""
    children: dict[int, list[int]] = {}
    for pid in process_ids():
        if (found := process_stat(pid)) is not None and not found.has_ended:
            children.setdefault(found.parent, []).append(pid)
    below = [child for root in roots for child in children.get(root, ())]
    for pid in below:  # grows during the loop
        below += children.get(pid, ())
    return below


def end_all(find: Callable[[], Collection[int]], *, within_s: float) -> None:
    """Kills the processes that ``find`` returns until it twice returns none, or the time is up.

    All are stopped before any is killed, so that none can fork meanwhile. Twice, since a look at ``/proc`` takes time:
    it misses a process that was made during it by one that ended during it. After ``find``'s OSError it looks again.
    """
    deadline = time.monotonic() + within_s
    stopped: set[int] = set()
    num_empty = 0
    while num_empty < 2 and time.monotonic() < deadline:
        with contextlib.suppress(OSError):  # descriptors or memory have run out
            left = set(find())
            num_empty = 0 if left else num_empty + 1
            fresh = left - stopped
            send(fresh or left, signal.SIGSTOP if fresh else signal.SIGKILL)
            stopped |= fresh
        time.sleep(0.005)


def send(pids: Collection[int], number: int) -> None:
    """Sends a signal; processes that have ended or are another user's are passed over."""
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def memory_bytes(root: int) -> int:
    """Memory of ``root`` and its descendants, including swap, with shared pages counted once."""
    lines = (line for pid in (root, *descendants(root)) for line in _read(pid, "smaps_rollup").splitlines())
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith((b"Pss:", b"SwapPss:")))


def mapped_shared(pid: int) -> set[int]:
    """Inode numbers of the files in ``/dev/shm`` that the process has mapped."""
    return {int(number) for number in _MAPPED.findall(_read(pid, "maps"))}


def shared_files() -> dict[str, int]:
    """Name -> inode number of the files in ``/dev/shm``."""
    with contextlib.suppress(OSError), os.scandir(SHARED_MEMORY) as entries:
        return {entry.name: entry.inode() for entry in entries}
    return {}


def remove_unused_shared(before: Collection[str], *, of: Collection[int] = ()) -> None:
    """Removes this user's files in ``/dev/shm`` that no process has mapped, of kinds that somebody always has.

    It looks twice, since another run's process makes a file, or is told its name, a moment before it maps it.

    Args:
        before: names of files that stay.
        of: processes whose mappings do not count.
    """
    unused = _unused_shared(before, of)
    if unused:
        time.sleep(MAPPED_WITHIN_S)
        unused &= _unused_shared(before, of)
    for name in unused:
        with contextlib.suppress(OSError):  # gone
            if (SHARED_MEMORY / name).stat().st_uid == os.geteuid():
                (SHARED_MEMORY / name).unlink()


def _unused_shared(before: Collection[str], of: Collection[int]) -> set[str]:
    # the files first, then who has mapped them: whoever makes one meanwhile keeps it
    fresh = {inode: name for name, inode in shared_files().items() if name not in before}
    fresh = {inode: name for inode, name in fresh.items() if _ALWAYS_MAPPED.fullmatch(name)}
    for pid in process_ids() - set(of) if fresh else ():
        for inode in mapped_shared(pid) & fresh.keys():
            del fresh[inode]
    return set(fresh.values())


def _read(pid: int, name: str) -> bytes:
    try:
        return (PROC / str(pid) / name).read_bytes()
    except OSError:
        return b""
