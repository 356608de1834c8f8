"""A clock of the time in which this process runs, for limits on what others do.

A batch system may stop all of a job's processes and continue them hours later (``scontrol suspend``). The system's
clocks go on meanwhile, so that by them every limit would be over at once, of work that could not go on either.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable

LOOK_S = 0.2
"""Pause between two looks of the clock's thread."""

MOST_S = 0.5
"""Most that counts between two looks: what is left to a limit after a stop is at least all but that."""


class RunningTime:
    """Seconds that this process has run since the first call, which any thread may make; a stop counts half a second.

    A thread looks all the time, so that callers may look as rarely as they like. A wait that ends in vain must be
    repeated if time is left by this clock.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counted, self._looked_at = 0.0, clock()
        self._begin()
        os.register_at_fork(after_in_child=self._begin)  # a fork has no threads, and may have the lock for ever

    def __call__(self) -> float:
        """The seconds."""
        if self._thread is None:
            self._start()
        return self._look()

    def _begin(self) -> None:
        self._lock = threading.RLock()  # a finalizer or a signal's handler may look in a thread that has it
        self._thread: threading.Thread | None = None

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._go_on, name="running time", daemon=True)
                with contextlib.suppress(RuntimeError):  # no room for a thread: only the callers look
                    self._thread.start()

    def _go_on(self) -> None:
        pause = threading.Event()
        while not pause.wait(LOOK_S):
            self._look()

    def _look(self) -> float:
        with self._lock:
            now = self._clock()
            self._counted += min(MOST_S, now - self._looked_at)
            self._looked_at = now
            return self._counted


running_time = RunningTime()
