"""Sets up logging, once per process, from the entry point of a command or worker."""

import fcntl
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console
from rich.logging import RichHandler

from gtpo_megatron.observability.known_warnings import FILE_ONLY, is_known, is_silent
from gtpo_megatron.run_folder.provenance import LOG_FILE

PACKAGES = ("gtpo_megatron", "recipes", "launchers", "tools")
"""Loggers that follow the configured level; other libraries log from WARNING on."""

LOCK_PATIENCE_S = 0.2
"""Longest wait for the file's lock; whoever has it may be stopped, and a line is written all the same."""

_FILE_FORMAT = "%(asctime)s %(levelname)-7s %(prefix)s%(name)s: %(message)s"
_TERMINAL_FORMAT = "%(prefix)s%(message)s"
_MARK = "_gtpo_megatron_handler"


def rank_prefix(rank: int, **coordinates: int) -> str:
    """``[rank 3 tp1 dp0]`` from ``rank_prefix(3, tp=1, dp=0)``."""
    return "[" + " ".join([f"rank {rank}", *(f"{axis}{index}" for axis, index in coordinates.items())]) + "]"


def set_up_logs(
    *, level: str = "INFO", run_folder: Path | None = None, prefix: str = "", console: Console | None = None
) -> None:
    """Gives the root logger a terminal handler and, if asked, one for ``log.txt``; a second call replaces them.

    Args:
        level: level of the loggers in ``PACKAGES``.
        run_folder: ``log.txt`` in it is appended to, one write per line and under its lock, so ranks of all machines
            can share it. None: no file.
        prefix: see :func:`rank_prefix`; empty in the driver.
        console: the console of the live display, so that log lines appear above it. If it is not a terminal, or None,
            plain lines go to stderr.
    """
    handlers: list[logging.Handler] = []
    if console is not None and console.is_terminal:
        terminal: logging.Handler = RichHandler(
            console=console, show_path=False, omit_repeated_times=False, log_time_format="%H:%M:%S", markup=False
        )
        terminal.setFormatter(logging.Formatter(_TERMINAL_FORMAT))
    else:
        terminal = logging.StreamHandler(sys.stderr)
        terminal.setFormatter(logging.Formatter(_FILE_FORMAT))
    terminal.addFilter(_TerminalFilter())
    handlers.append(terminal)
    if run_folder is not None:
        run_folder.mkdir(parents=True, exist_ok=True)
        to_file = _LogFile(run_folder / LOG_FILE, encoding="utf-8", delay=True)
        to_file.setFormatter(logging.Formatter(_FILE_FORMAT))
        handlers.append(to_file)

    root = logging.getLogger()
    for old in [handler for handler in root.handlers if getattr(handler, _MARK, False)]:
        root.removeHandler(old)
        old.close()
    for handler in handlers:
        setattr(handler, _MARK, True)
        handler.addFilter(_PrefixFilter(prefix))
        root.addHandler(handler)
    root.setLevel(logging.WARNING)
    for package in PACKAGES:
        logging.getLogger(package).setLevel(level)
    logging.captureWarnings(capture=True)


class _LogFile(logging.FileHandler):
    """A log file that reports a failed write, such as on a full disk, once on stderr, and keeps trying."""

    _is_failing = False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.stream = self.stream or self._open()
            with _alone(self.stream.fileno()):
                super().emit(record)  # opening it raises, writing calls handleError
        except OSError:
            self.handleError(record)

    def flush(self) -> None:
        super().flush()
        self._is_failing = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's own name
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._is_failing:
            self._is_failing = True
            sys.stderr.write(f"{self.baseFilename} cannot be written ({error.strerror}): lines are missing there\n")


@contextmanager
def _alone(descriptor: int) -> Iterator[None]:
    """Holds the lock of the file, if there is one to be had in time.

    Several machines that append to a file over NFS write where each believes its end to be, one over the other. Who has
    its lock knows the end, and has handed over what it wrote when another gets it.
    """
    has_lock = _has_locked(descriptor)
    try:
        yield
    finally:
        if has_lock:
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)


def _has_locked(descriptor: int) -> bool:
    deadline = time.monotonic() + LOCK_PATIENCE_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(LOCK_PATIENCE_S / 20)
        except OSError:
            return False  # no locks on this disk
        else:
            return True


class _TerminalFilter(logging.Filter):
    """Leaves out what is for the file only, known warnings of libraries, and one that the terminal has had already."""

    def __init__(self) -> None:
        super().__init__()
        self._warned: set[tuple[str, str]] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        if any(getattr(record, name, False) for name in FILE_ONLY):
            return False
        if record.levelno != logging.WARNING:
            return True
        if is_known(record.getMessage()):
            return False
        warned = (record.name, record.getMessage())
        is_new = warned not in self._warned
        self._warned.add(warned)
        return is_new


class _PrefixFilter(logging.Filter):
    """Adds the rank to every record, including those of other libraries, and drops those that are for nobody."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self._prefix = f"{prefix} " if prefix else ""

    def filter(self, record: logging.LogRecord) -> bool:
        record.prefix = self._prefix
        return not is_silent(record.getMessage())
