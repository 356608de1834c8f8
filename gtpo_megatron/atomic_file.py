"""Replaces a file atomically: a reader finds the old or the new content, also after a crash."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

SCRATCH_ENDING = ".tmp"
"""Suffix of the temporary file with the new content, in the same folder."""


@contextmanager
def replaced_file(path: Path) -> Iterator[BinaryIO]:
    """Opens a temporary file that replaces ``path`` when the block ends without an error.

    Links are followed. A device or pipe is written to directly.

    Raises:
        OSError: it cannot be written; the old content stays, and the temporary file is removed.
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
        with suppress(OSError):  # the first error is raised
            scratch.unlink(missing_ok=True)
        raise


def write_file(path: Path, content: str | bytes, *, errors: str = "strict") -> None:
    """Replaces a file by this content; see :func:`replaced_file`.

    Args:
        path: the file.
        content: text is written as UTF-8.
        errors: how :meth:`str.encode` treats surrogates.

    Raises:
        OSError: it cannot be written.
    """
    with replaced_file(path) as file:
        file.write(content.encode("utf-8", errors) if isinstance(content, str) else content)
