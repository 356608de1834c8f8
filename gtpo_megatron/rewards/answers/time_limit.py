"""Ends a computation in Python after some seconds of processor time, in any thread."""

import ctypes
import threading
import time
from collections.abc import Callable
from typing import TypeVar

AGAIN_S = 0.05
"""Pause before the computation is interrupted again: some libraries catch every exception."""

MOST_WAITING = 6
"""Times the limit that a computation may take by the clock if it hardly works: one that waits for ever ends, too."""
LEAST_SHARE = 0.02
"""Of a processor that a computation gets even on a machine with fifty times as many; with less it waits."""

Result = TypeVar("Result")


class _Late(BaseException):
    """Thrown into the thread; not an Exception, so that a library does not take it for its own."""


def within(seconds: float, call: Callable[[], Result], *, what: str) -> Result:
    """Returns the result of the call, which is ended after so many seconds of its thread's processor time.

    So a busy machine changes no verdict. A call that hardly works is ended after ``MOST_WAITING`` times as many by the
    clock; where the system does not tell the time of a thread, the clock counts alone.

    A signal would work in the main thread only, and a process would cost more than what it computes. The limit is seen
    between two operations of the interpreter: one operation, such as a power of large integers, is not interrupted.
    Costs a thread that waits, about 0.3 ms.

    Args:
        seconds: limit of processor time.
        call: the computation.
        what: name of the computation, for the message.

    Raises:
        TimeoutError: it was ended.
    """
    thread = ctypes.c_ulong(threading.get_ident())
    throw = ctypes.pythonapi.PyThreadState_SetAsyncExc
    lock = threading.Lock()
    done = threading.Event()
    left = _clock(seconds)

    def watch() -> None:
        wait = seconds
        while not done.wait(wait):
            with lock:  # while it is held the thread lives, and so does its clock
                if done.is_set():
                    return
                if (wait := left()) <= 0.0:
                    throw(thread, ctypes.py_object(_Late))
                    wait = AGAIN_S

    def stop() -> None:
        while True:
            try:
                with lock:
                    done.set()
                    throw(thread, None)  # one that is thrown and not yet seen
                return
            except _Late:  # seen just now: the watcher may go on
                continue

    try:
        try:
            threading.Thread(target=watch, name="time limit", daemon=True).start()
            return call()
        finally:
            stop()
    except _Late as late:
        raise TimeoutError(
            f"{what} took longer than {seconds:g} s of processor time, or waited {MOST_WAITING} times as long"
        ) from late


def _clock(seconds: float) -> Callable[[], float]:
    """Returns what tells how many seconds this thread has left, from any thread."""
    began = time.monotonic()
    if not hasattr(time, "pthread_getcpuclockid"):  # macOS
        return lambda: began + seconds - time.monotonic()
    clock = time.pthread_getcpuclockid(threading.get_ident())
    used = time.clock_gettime(clock)

    def left() -> float:
        waited, worked = time.monotonic() - began, time.clock_gettime(clock) - used
        patience = MOST_WAITING * seconds - waited
        if patience > 0.0:
            return min(seconds - worked, patience)
        return 0.0 if worked < waited * LEAST_SHARE else seconds - worked

    return left
