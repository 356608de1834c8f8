"""Requests to stop a run: it finishes the step, saves, and exits with status 75.

A batch script touches a file in the run folder, which works on any node. A person or a supervisor sends SIGUSR1 or
SIGTERM to the driver; a second SIGTERM ends it at once. While the processes of a run start, the first signal ends it.
"""

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

logger = logging.getLogger(__name__)

STOP_FILE = "stop_requested"
"""File in the run folder; its text is the reason in the log."""

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGTERM)

EXIT_STOPPED = 75
"""Exit status of a run that was stopped and saved, to be resumed (``EX_TEMPFAIL`` of sysexits.h)."""


class StopAtOnce(BaseException):
    """A request to stop while no step is running."""


class StopRequest:
    """Listens for requests to stop this run.

    Args:
        run_folder: the folder of the file.
    """

    def __init__(self, run_folder: Path) -> None:
        self._file = run_folder / STOP_FILE
        self._signal = ""
        self._is_at_once = False
        self._before: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> "StopRequest":
        self.listen()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def listen(self) -> None:
        """Sets the signal handlers, again after a library (Ray) has replaced them; only in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in STOP_SIGNALS:
            before = signal.signal(number, self._on_signal)
            self._before.setdefault(number, before)

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
        return written or f"{self._file.name} in the run folder"

    def close(self) -> None:
        """Restores the signal handlers and removes the file."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
        self._file.unlink(missing_ok=True)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the signature of a handler
        if self._signal and number == signal.SIGTERM:
            raise KeyboardInterrupt  # the second signal: do not wait for the end of the step
        self._signal = signal.Signals(number).name
        if self._is_at_once:
            raise StopAtOnce
