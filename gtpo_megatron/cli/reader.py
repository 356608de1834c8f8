"""Commands whose output nobody reads any more: the reader of a pipe has left (``| head``), or a terminal was closed."""

import errno
import io
import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

EXIT_READER_LEFT = 141
"""The status that a shell reports for a program ended by SIGPIPE."""


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """Exits with status 141 if stdout is a pipe without a reader; other broken pipes still raise.

    What is written to a terminal that was closed is lost without an error: SIGHUP has told the command.
    """
    with _swallowing(errno.EIO):
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


@contextmanager
def hangs_up() -> Iterator[None]:
    """Within the block a reader that leaves is a SIGHUP, so that a run saves itself; what nobody reads is lost.

    A signal to the group of ``gtpo-megatron train ... | tee FILE`` ends ``tee`` too.
    """
    with _swallowing(errno.EIO, errno.EPIPE, raises=signal.SIGHUP):
        yield


class _Output(io.FileIO):
    """A standard stream that swallows some errors, and raises a signal at the first of them."""

    swallowed: tuple[int, ...] = ()
    raises: signal.Signals | None = None
    _is_lost = False

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            if error.errno not in self.swallowed:
                raise
            if not self._is_lost and self.raises is not None:
                signal.raise_signal(self.raises)
            self._is_lost = True
            return len(data)


@contextmanager
def _swallowing(*errors: int, raises: signal.Signals | None = None) -> Iterator[None]:
    """Replaces stdout and stderr for the block, where they are files of the system's."""
    before = sys.stdout, sys.stderr
    for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
        try:
            output = _Output(stream.fileno(), "w", closefd=False)
        except (OSError, ValueError, AttributeError):  # closed, or in the memory of a test
            continue
        output.swallowed, output.raises = errors, raises
        stream.flush()
        text = io.TextIOWrapper(
            io.BufferedWriter(output),
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=getattr(stream, "line_buffering", False),
            write_through=getattr(stream, "write_through", False),
        )
        setattr(sys, name, text)
    try:
        yield
    finally:
        with suppress(OSError):  # the last words have been flushed, or nobody reads them
            sys.stdout.flush()
            sys.stderr.flush()
        sys.stdout, sys.stderr = before


def _nobody_reads(file: int) -> bool:
    poll = select.poll()
    poll.register(file, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
