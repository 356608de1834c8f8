"""Requests to stop a run: it finishes the step, saves, and exits with status 75.

A batch script touches a file in the run folder, which works on any node. A person, a terminal that closes or a
supervisor sends a signal, to the driver or to all of its process group; another one, later than ``SAME_REQUEST_S``,
ends it at once. While the processes of a run start, the first signal ends it.
"""

import logging
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

logger = logging.getLogger(__name__)

STOP_FILE = "stop_requested"
"""File in the run folder; its text is the reason in the log."""

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

SAME_REQUEST_S = 2.0
"""Signals that are this close are one request: ``timeout`` signals its child and then the group that both are in, a
closing terminal is told of by the shell and by the kernel, and a program in front (``uv run``, ``srun``) passes on the
Ctrl-C that the run has had already."""

EXIT_STOPPED = 75
"""Exit status of a run that was stopped and saved, to be resumed (``EX_TEMPFAIL`` of sysexits.h)."""

SHELL_OFFSET = 128
"""What a shell adds to the number of a signal that ended a program, for a status."""


class StopAtOnce(BaseException):
    """A request to stop while no step is running."""


class Requests:
    """Tells a new request to stop from signals that belong to the one before.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: float | None = None

    def is_new(self) -> bool:
        """Whether a signal that comes now is a request of its own; to be asked once a signal."""
        now = self._clock()
        if self._last is not None and now - self._last < SAME_REQUEST_S:
            return False
        self._last = now
        return True


def interrupt(number: int) -> KeyboardInterrupt:
    """Makes the exception that a signal raises where nothing is to be finished; it carries the signal's name."""
    return KeyboardInterrupt(signal.Signals(number).name)


def named_signal(error: KeyboardInterrupt) -> signal.Signals | None:
    """The signal that ``interrupt`` has made it of; None if something else has raised it."""
    return signal.Signals.__members__.get(str(error))


class StopRequest:
    """Listens for requests to stop this run.

    Args:
        run_folder: the folder of the file.
    """

    def __init__(self, run_folder: Path) -> None:
        self._file = run_folder / STOP_FILE
        self._signal = ""
        self._requests = Requests()
        self._is_at_once = False
        self._is_unread = False
        self._before: dict[signal.Signals, signal._HANDLER] = {}
        self._said: queue.SimpleQueue[str] = queue.SimpleQueue()  # which a handler may put to at any moment

    def __enter__(self) -> "StopRequest":
        self.listen()
        threading.Thread(target=self._say, name="stop request", daemon=True).start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def listen(self) -> None:
        """Sets the signal handlers, again after a library has replaced them; only in the main thread.

        What was ignored when the run began, such as SIGHUP under ``nohup``, stays so.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        for number in STOP_SIGNALS:
            if self._before.setdefault(number, signal.getsignal(number)) is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Within the block a signal, also an earlier one, raises at once.

        Raises:
            StopAtOnce: a signal arrived. Inside Ray's calls the exception becomes a SystemError, so any error of the
                block after a signal, except KeyboardInterrupt, is replaced by it.
        """
        if self._signal:
            raise StopAtOnce
        self._is_at_once = True
        try:
            yield
        except (KeyboardInterrupt, StopAtOnce):
            raise
        except BaseException as error:
            if self._signal:
                raise StopAtOnce from error
            raise
        finally:
            self._is_at_once = False

    def reason(self) -> str:
        """The reason to stop; empty if there is no request."""
        if self._signal:
            return self._signal
        try:
            written = self._file.read_text(encoding="utf-8", errors="replace").strip()
        except FileNotFoundError:
            return ""
        except OSError as error:  # of a network disk, for a moment; a signal is heard without it
            if not self._is_unread:
                logger.warning("%s cannot be read, so it stops nothing: %s", self._file, error.strerror)
            self._is_unread = True
            return ""
        return written or f"{self._file.name} in the run folder"

    def close(self) -> None:
        """Restores the signal handlers and removes the file."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
        self._said.put("")
        try:
            self._file.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("%s is left, and stops the next start: %s", self._file, error.strerror)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the signature of a handler
        if not self._requests.is_new():
            return
        if self._signal:
            raise interrupt(number)  # do not wait for the end of the step
        self._signal = signal.Signals(number).name
        if self._is_at_once:
            raise StopAtOnce
        self._said.put(self._signal)

    def _say(self) -> None:
        """Says that a request was heard, since the end of the step may be far.

        In a thread of its own: a handler may have come in the middle of another line.
        """
        if asked := self._said.get():
            logger.warning("%s: the run saves itself at the end of this step and stops; again ends it at once", asked)
