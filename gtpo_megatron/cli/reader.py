"""Ends a command silently if the reader of its output has left (``| head``)."""

import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

EXIT_READER_LEFT = 141
"""The status that a shell reports for a program ended by SIGPIPE."""


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """Exits with status 141 if stdout is a pipe without a reader; other broken pipes still raise."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not _nobody_reads(sys.stdout.fileno()):
            raise
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())  # else the interpreter reports the error at exit
        sys.exit(EXIT_READER_LEFT)


def _nobody_reads(file: int) -> bool:
    poll = select.poll()
    poll.register(file, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
