"""Replaces a file at once: whoever reads it, after a crash too, finds the old content or the new one."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

SCRATCH_ENDING = ".tmp"
"""Of the file that the new content is written to first, beside the old one."""


@contextmanager
def replaced_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write the new content to; it takes the place of ``path`` when the block ends without an error.

    A link is followed. What is no regular file (a device, a pipe) cannot be replaced: it is written to.

    Raises:
        OSError: it cannot be written; the old content stays, and nothing is left beside it.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        mode = None
    if mode is not None and not stat.S_ISREG(mode):
        with path.open("wb") as file:
            yield file
        return
    target = Path(os.path.realpath(path))
    scratch = target.with_name(target.name + SCRATCH_ENDING)
    try:
        with scratch.open("wb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), stat.S_IMODE(mode))
            yield file
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(target)
    except BaseException:
        with suppress(OSError):  # the first error is the one to hear of
            scratch.unlink(missing_ok=True)
        raise


def write_file(path: Path, content: str | bytes, *, errors: str = "strict") -> None:
    """Replaces a file by this content; see :func:`replaced_file`.

    Args:
        path: of the file.
        content: text is written as UTF-8.
        errors: what happens to half a surrogate pair, as for :meth:`str.encode`.

    Raises:
        OSError: it cannot be written.
    """
    with replaced_file(path) as file:
        file.write(content.encode("utf-8", errors) if isinstance(content, str) else content)
