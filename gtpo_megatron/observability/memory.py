"""Memory of a process: its peak with its descendants, from ``/proc``, and what it has freed.

The peak is the sum of **PSS** (proportional set size): a page shared by n processes counts 1/n in each, so shared
libraries, forked pages and shared-memory object stores count once. A process whose PSS cannot be read (another user's,
no Linux) counts with its RSS, which counts shared pages fully. GPU memory, processes on other machines and peaks
between two readings are not included.
"""

import ctypes
import logging
import threading
import time
from collections.abc import Callable

import psutil

from gtpo_megatron.machine_memory import memory

GIB = 1024.0**3
MAX_OVERHEAD = 0.02
"""Largest fraction of one core spent on reading: PSS costs about 10 ms per GiB of 4 kB pages."""

STAGE_POLL_S = 0.02
"""Seconds between queries of the running stage."""

AMPLE = 0.5
"""Part of the machine's memory that is free where no process waits for what another one has freed."""

_MAPPED_BLOCKS, _KEPT_BYTES = -4, -1
"""M_MMAP_MAX and M_TRIM_THRESHOLD of glibc's malloc.h; -1 bytes are all."""

_log = logging.getLogger(__name__)


def keep_free_memory() -> None:
    """Has glibc keep the memory of tensors that are freed, for the next ones: else each begins with page faults.

    A peak is as high as before. Nothing happens where the C library is another one.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):  # it is glibc's, whose numbers of options these are
        library.mallopt(_MAPPED_BLOCKS, 0)
        library.mallopt(_KEPT_BYTES, -1)


def return_free_memory() -> None:
    """Gives memory that this process has freed back to the system; glibc keeps it, gigabytes after an update.

    The next user of the memory pays with page faults, a second for four gigabytes. Nothing happens where the C library
    is another one.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def return_scarce_memory() -> None:
    """``return_free_memory``, unless much of the machine's is free: then nobody waits for it."""
    total, free = memory()
    if free < total * AMPLE:
        return_free_memory()


def tree_memory_gib(pid: int | None = None) -> tuple[float, str]:
    """Memory of a process and its descendants now.

    Args:
        pid: root of the tree; None: this process.

    Returns:
        GiB, and ``"pss"``, or ``"rss"`` if that was used for any process. A root that has ended
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
            continue  # it ended between listing and reading
        except (psutil.AccessDenied, AttributeError):
            kind = "rss"
            total += _rss(process)
    return total / GIB, kind


class PeakMemory:
    """Reads the memory of a process tree in a background thread while it is entered.

    Args:
        pid: root of the tree; None: this process.
        interval_s: seconds between readings; longer if reading is slow, to stay below 2% of a core.
        stage: returns the running stage (``StageTimers.current``); empty between stages.
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
        """``memory/peak_gib`` since the last call, including a reading now, and ``memory/<stage>_peak_gib``.

        A stage without a reading is absent.
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
        """Waits until a stage without a reading runs, or the timeout; True if the thread must stop.

        Without it, short stages would rarely get a reading.
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
