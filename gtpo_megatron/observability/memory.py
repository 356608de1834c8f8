"""Peak memory of a process and everything it started, from ``/proc``.

The figure is the sum of **PSS** (proportional set size): a page shared by n processes counts 1/n in each, so that
shared libraries, forked pages and shared-memory object stores enter the sum once. Where the kernel refuses PSS (another
user's process, no Linux), that process counts with its RSS, which overstates what is shared. Not included: GPU
memory, processes on other machines, a peak between two readings.
"""

import logging
import threading
import time
from collections.abc import Callable

import psutil

GIB = 1024.0**3
MAX_OVERHEAD = 0.02
"""Largest share of one core spent on reading: PSS costs about 10 ms per GiB of 4 kB pages."""

STAGE_POLL_S = 0.02
"""How often it is asked which stage is running."""

_log = logging.getLogger(__name__)


def tree_memory_gib(pid: int | None = None) -> tuple[float, str]:
    """Memory of a process and its descendants now.

    Args:
        pid: root of the tree; None: this process.

    Returns:
        GiB, and what was counted: ``"pss"``, or ``"rss"`` if any process would give only that. A root that has ended
        counts 0.
    """
    try:
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0.0, "pss"
    total, kind = 0, "pss"
    for process in processes:
        try:
            total += process.memory_full_info().pss
        except psutil.NoSuchProcess:
            continue  # it ended between listing and reading, and so did its memory
        except (psutil.AccessDenied, AttributeError):
            kind = "rss"
            total += _rss(process)
    return total / GIB, kind


class PeakMemory:
    """Reads the memory of a process tree in a background thread while it is entered.

    Args:
        pid: root of the tree; None: this process.
        interval_s: seconds between readings; stretched where reading is slow, so that it stays below 2% of a core.
        stage: asked at every reading which stage is running (``StageTimers.current``); empty between stages.
    """

    def __init__(
        self, pid: int | None = None, *, interval_s: float = 1.0, stage: Callable[[], str] = lambda: ""
    ) -> None:
        self._pid = pid
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._stage = stage
        self._peaks: dict[str, float] = {}
        self._kind = ""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "PeakMemory":
        self._stop.clear()
        self._thread = threading.Thread(target=self._sample, name="peak-memory", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def take(self) -> dict[str, float]:
        """``memory/peak_gib`` since the last call, a reading made now included, and ``memory/<stage>_peak_gib``.

        A stage in which no reading fell is absent.
        """
        self._read()
        with self._lock:
            peaks, self._peaks = self._peaks, {}
        by_stage = {f"memory/{stage}_peak_gib": peak for stage, peak in sorted(peaks.items()) if stage}
        return by_stage | {"memory/peak_gib": max(peaks.values())}

    def _sample(self) -> None:
        while True:
            start = time.perf_counter()
            self._read()
            pause = max(self._interval_s, (time.perf_counter() - start) / MAX_OVERHEAD)
            if self._stop.wait(pause) or self._wait_for_new_stage(pause):
                return

    def _wait_for_new_stage(self, timeout_s: float) -> bool:
        """Waits until a stage runs that has no reading yet, but not for ever; True where the reading is to end.

        Short stages would hardly ever be met otherwise.
        """
        deadline = time.perf_counter() + timeout_s
        while self._stage() in self._peaks and (left := deadline - time.perf_counter()) > 0:
            if self._stop.wait(min(left, STAGE_POLL_S)):
                return True
        return False

    def _read(self) -> None:
        stage = self._stage()
        gib, kind = tree_memory_gib(self._pid)
        with self._lock:
            self._peaks[stage] = max(self._peaks.get(stage, 0.0), gib)
            if kind != self._kind:
                self._kind = kind
                _log.info("memory/peak_gib is the sum of %s over the process tree", kind.upper())


def _rss(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0
