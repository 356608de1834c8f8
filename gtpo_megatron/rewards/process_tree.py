"""What a process has started, whatever it became: found by parents, ended whole, measured whole.

Little is imported: every grading process has a supervisor that imports this.
"""

import os
import signal
import time
from pathlib import Path

from gtpo_megatron.proc_files import process_ids, process_stat

END_PATIENCE_S = 5.0
"""Longest time that killed processes may take to be gone."""


def descendants(root: int) -> list[int]:
    """The living processes below ``root``, children before their own children."""
    children: dict[int, list[int]] = {}
    for process in process_ids():
        stat = process_stat(process)
        if stat is not None and not stat.has_ended:
            children.setdefault(stat.parent, []).append(process)
    below = list(children.get(root, ()))
    for process in below:  # grows meanwhile
        below += children.get(process, ())
    return below


def end_descendants(root: int) -> None:
    """Kills all processes below ``root``, which adopts orphans (``supervisor.py``), so that none slips through.

    All are stopped before any is killed: what forks while it is looked for cannot win.
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
    """Of ``root`` and all below it: what they hold and have swapped out, shared pages counted once among them."""
    return sum(_memory(process) for process in (root, *descendants(root)))


def is_stopped(process: int) -> bool:
    """By a signal, such as a shell or a batch system sends."""
    stat = process_stat(process)
    return stat is not None and stat.is_stopped


def _memory(process: int) -> int:
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_bytes().splitlines()
    except OSError:  # gone meanwhile, or of another user
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith((b"Pss:", b"SwapPss:")))


def _signal(process: int, number: int) -> None:
    try:
        os.kill(process, number)
    except (ProcessLookupError, PermissionError):  # gone meanwhile, or of another user
        return
