"""Finds, ends and measures the descendants of a process. Imports little, because every supervisor imports it."""

import os
import signal
import time
from pathlib import Path

from gtpo_megatron.proc_files import process_ids, process_stat

END_PATIENCE_S = 5.0
"""Longest wait for killed processes to end."""


def descendants(root: int) -> list[int]:
    """The living processes below ``root``, children before their own children."""
    children: dict[int, list[int]] = {}
    for process in process_ids():
        stat = process_stat(process)
        if stat is not None and not stat.has_ended:
            children.setdefault(stat.parent, []).append(process)
    below = list(children.get(root, ()))
    for process in below:  # grows during the loop
        below += children.get(process, ())
    return below


def end_descendants(root: int) -> None:
    """Kills all processes below ``root``, which must adopt orphans (``supervisor.py``).

    All are stopped before any is killed, so that none can fork meanwhile.
    """
    deadline = time.monotonic() + END_PATIENCE_S
    stopped: set[int] = set()
    while (left := set(descendants(root)) - stopped) and time.monotonic() < deadline:
        for process in left:
            _signal(process, signal.SIGSTOP)
        stopped |= left
    while (left := set(descendants(root))) and time.monotonic() < deadline:
        for process in left:
            _signal(process, signal.SIGKILL)
        time.sleep(0.002)


def memory_bytes(root: int) -> int:
    """Memory of ``root`` and its descendants, including swap, with shared pages counted once."""
    return sum(_memory(process) for process in (root, *descendants(root)))


def is_stopped(process: int) -> bool:
    """Whether a signal has stopped the process."""
    stat = process_stat(process)
    return stat is not None and stat.is_stopped


def _memory(process: int) -> int:
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_bytes().splitlines()
    except OSError:  # it has ended, or belongs to another user
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith((b"Pss:", b"SwapPss:")))


def _signal(process: int, number: int) -> None:
    try:
        os.kill(process, number)
    except (ProcessLookupError, PermissionError):  # it has ended, or belongs to another user
        return
