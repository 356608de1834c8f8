"""Whoever reads a command's output may leave early (``| head``); the command then ends without a word, as others do."""

import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

EXIT_READER_LEFT = 141
"""What a shell reports of a program that SIGPIPE ended."""


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """Exits with status 141 if stdout is a pipe that nobody reads any more; a pipe of anything else still fails."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not _nobody_reads(sys.stdout.fileno()):
            raise
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())  # or the interpreter complains of what is still buffered
        sys.exit(EXIT_READER_LEFT)


def _nobody_reads(file: int) -> bool:
    poll = select.poll()
    poll.register(file, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
