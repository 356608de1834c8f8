"""Commands whose output nobody reads: the reader of a pipe has left (``| head``), or a terminal was closed."""

import io
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

EXIT_PIPE_CLOSED = 141
"""The status that a shell reports for a program ended by SIGPIPE."""


@contextmanager
def exit_when_pipe_closes() -> Iterator[None]:
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
        sys.exit(EXIT_PIPE_CLOSED)


@contextmanager
def output_may_be_lost() -> Iterator[None]:
    """Within the block output that nobody reads is dropped, so that it ends no run; ``log.txt`` has what counts.

    A Ctrl-C in front of ``gtpo-megatron train ... | tee FILE`` ends ``tee`` at once, and the run saves itself first.
    """
    before = sys.stdout, sys.stderr
    for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
        try:
            output = io.BufferedWriter(_Output(stream.fileno(), "w", closefd=False))
        except (OSError, ValueError, AttributeError):  # closed, or in the memory of a test
            continue
        stream.flush()
        text = io.TextIOWrapper(output, encoding=stream.encoding, errors=stream.errors, line_buffering=True)
        setattr(sys, name, text)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before


class _Output(io.FileIO):
    """A standard stream that drops what cannot be written."""

    def write(self, data: Any, /) -> int:
        with suppress(OSError):
            return super().write(data) or 0
        return len(data)


def _nobody_reads(file: int) -> bool:
    poll = select.poll()
    poll.register(file, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
