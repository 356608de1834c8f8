"""How a run is asked to stop: finish the step, save, leave with a status that says "start me again".

Two ways, for two kinds of askers. A batch system's script touches a file in the run folder, which reaches a driver on
any node. A person or a supervisor signals the driver's process: SIGUSR1 or SIGTERM; a second SIGTERM ends it at once.
While the processes of a run start there is no step to finish, and the first signal ends it.
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
"""In the run folder; whatever is written in it is the reason that the log shows."""

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGTERM)

EXIT_STOPPED = 75
"""Of a run that was asked to stop and is saved: start it again with ``--resume`` (``EX_TEMPFAIL`` of sysexits.h)."""


class StopAtOnce(BaseException):
    """Asked to stop where nothing has begun that is to be finished first."""


class StopRequest:
    """Whether somebody has asked this run to stop.

    Args:
        run_folder: may hold the file.
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
        """Takes the signals; again after a library (Ray) has taken them. Only a main thread can have them."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in STOP_SIGNALS:
            before = signal.signal(number, self._on_signal)
            self._before.setdefault(number, before)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """For a time in which a signal need not wait, nor one that has come before.

        Raises:
            StopAtOnce: one has come. Inside one of Ray's calls the exception becomes a SystemError, so whatever ends
                the block after the signal counts as its doing; but for a KeyboardInterrupt.
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
        """Why the run is to stop; empty if it is not."""
        if self._signal:
            return self._signal
        try:
            written = self._file.read_text(encoding="utf-8", errors="replace").strip()
        except FileNotFoundError:
            return ""
        return written or f"{self._file.name} in the run folder"

    def close(self) -> None:
        """Gives the signals back and removes the file: what was asked for has been done, or is no longer needed."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
        self._file.unlink(missing_ok=True)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the signature of a handler
        if self._signal and number == signal.SIGTERM:
            raise KeyboardInterrupt  # asked twice: whoever it is does not want to wait for the step's end
        self._signal = signal.Signals(number).name
        if self._is_at_once:
            raise StopAtOnce
