"""Ends a computation in Python after some seconds, in any thread."""

import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

AGAIN_S = 0.05
"""Pause before the computation is interrupted again: some libraries catch every exception."""

Result = TypeVar("Result")


class _Late(BaseException):
    """Thrown into the thread; not an Exception, so that a library does not take it for its own."""


def within(seconds: float, call: Callable[[], Result], *, what: str) -> Result:
    """Returns the result of the call, which is ended after so many seconds.

    A signal would work in the main thread only, and a process would cost more than what it computes. The limit is seen
    between two operations of the interpreter: one operation, such as a power of large integers, is not interrupted.
    Costs a thread that waits, about 0.3 ms.

    Args:
        seconds: wall-clock limit.
        call: the computation.
        what: it is, for the message.

    Raises:
        TimeoutError: it was ended.
    """
    thread = ctypes.c_ulong(threading.get_ident())
    throw = ctypes.pythonapi.PyThreadState_SetAsyncExc
    lock = threading.Lock()
    done = threading.Event()

    def watch() -> None:
        wait = seconds
        while not done.wait(wait):
            with lock:
                if not done.is_set():
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
        raise TimeoutError(f"{what} took longer than {seconds:g} s") from late
