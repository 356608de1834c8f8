"""Replaces a file atomically: a reader finds the old or the new content, also after a crash."""

import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

SCRATCH_ENDING = ".tmp"
"""Suffix of the temporary file with the new content, in the same folder."""
STALE_S = 3600.0
"""Age from which on a temporary file is that of a process that was killed; none is written to for so long."""


@contextmanager
def replaced_file(path: Path) -> Iterator[BinaryIO]:
    """Opens a temporary file that replaces ``path`` when the block ends without an error.

    Links are followed. A device or pipe is written to directly. Several processes may replace the same file: each has
    a temporary file of its own, and the last to end decides. Those that killed ones left an hour ago are removed.

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
    scratch = target.with_name(f"{target.name}.{secrets.token_hex(4)}{SCRATCH_ENDING}")
    try:
        with scratch.open("xb") as file:
            _remove_stale(target, now=os.fstat(file.fileno()).st_mtime)
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


def _remove_stale(target: Path, *, now: float) -> None:
    """Removes temporary files of ``target`` that nobody writes to any more; what cannot be removed stays.

    Args:
        target: the file that they were to replace.
        now: time on the clock of the file system, which may be another machine's.
    """
    name = re.compile(re.escape(target.name) + r"(\.[0-9a-f]{8})?" + re.escape(SCRATCH_ENDING))
    with suppress(OSError), os.scandir(target.parent) as entries:
        for entry in entries:
            if name.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                with suppress(OSError):  # another writer has removed it
                    if now - entry.stat(follow_symlinks=False).st_mtime > STALE_S:
                        os.unlink(entry.path)  # noqa: PTH108 - its path is text already


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
