"""Readers of bytes and text with size limits and one-line errors."""

import os
import reprlib
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from gtpo_megatron.errors import DataError, GTPOError

MAX_BYTES = 256 << 20
"""Size limit of a file read at once; the checkpoint index of a large model has 100 MB."""
MAX_LINE_BYTES = 64 << 20
"""Size limit of a line; a response of 100,000 tokens has 4 MB."""
CHUNK_BYTES = 1 << 20
"""What is read at a time of a file that is longer than it says: it grows, or is one of ``/proc``, whose size is 0."""
MAX_SHOWN = 80
"""Characters of a value in a message."""

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxlong, _SHORT.maxother = 4, MAX_SHOWN, MAX_SHOWN, MAX_SHOWN

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def shown(value: object) -> str:
    """A value as one short line, for messages."""
    try:
        text = repr(value[: MAX_SHOWN + 1]) if isinstance(value, str) else _SHORT.repr(value)
    except ValueError:  # an integer of more digits than Python writes
        return "a number of thousands of digits"
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def printable(text: object) -> str:
    """Text as one line; line breaks and other control characters become escapes or blanks."""
    words = " ".join(str(text).split())
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in words)


def read_bytes(path: Path, *, limit: int = MAX_BYTES, error: type[GTPOError] = DataError) -> bytes:
    """Reads a whole file.

    Args:
        path: a regular file; devices and pipes are refused.
        limit: size limit in bytes.
        error: class of errors raised.

    Raises:
        GTPOError: ``error``: it is missing, not a regular file, unreadable or too large.
    """
    with _opened(path, error) as file:
        content = _read_up_to(file, limit + 1)
    if len(content) > limit:
        raise error(f"{printable(path)}: is larger than {limit} bytes, the most that is read of such a file")
    return content


def _read_up_to(file: BinaryIO, most: int) -> bytes:
    """Its first ``most`` bytes, in memory for what is there: a read takes all that is asked for before it begins."""
    wanted = min(os.fstat(file.fileno()).st_size + 1, most)  # one byte more shows that it ends there
    parts = []
    while True:
        parts.append(file.read(wanted))
        most -= len(parts[-1])
        if len(parts[-1]) < wanted or not most:
            return b"".join(parts)
        wanted = min(CHUNK_BYTES, most)


def find_bytes(path: Path, *, limit: int = MAX_BYTES, error: type[GTPOError] = DataError) -> bytes | None:
    """Like :func:`read_bytes`; None if there is no such file."""
    try:
        return read_bytes(path, limit=limit, error=error)
    except GTPOError as problem:
        if isinstance(problem.__cause__, FileNotFoundError | NotADirectoryError):
            return None
        raise


def check_file(path: Path, *, error: type[GTPOError] = DataError) -> None:
    """Checks that a file can be opened, before a library opens it.

    Raises:
        GTPOError: ``error``, as in :func:`read_bytes`.
    """
    with _opened(path, error):
        pass


def read_text(path: Path, *, limit: int = MAX_BYTES, error: type[GTPOError] = DataError) -> str:
    """Like :func:`read_bytes`, decoded without a byte order mark."""
    return decoded(read_bytes(path, limit=limit, error=error), printable(path), error)


def find_text(path: Path, *, limit: int = MAX_BYTES, error: type[GTPOError] = DataError) -> str | None:
    """Like :func:`read_text`; None if there is no such file."""
    content = find_bytes(path, limit=limit, error=error)
    return None if content is None else decoded(content, printable(path), error)


def decoded(content: bytes, place: str, error: type[GTPOError] = DataError) -> str:
    """Decodes UTF-8 with or without a byte order mark.

    Raises:
        GTPOError: ``error``: it is not UTF-8.
    """
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        byte = content[problem.start]
        raise error(
            f"{place}: not UTF-8 text (byte 0x{byte:02x} at offset {problem.start}); is it binary, or of another "
            f"encoding?"
        ) from problem


def numbered_lines(path: Path, *, error: type[GTPOError] = DataError) -> Iterator[tuple[int, bytes]]:
    """Yields the lines of a file with numbers from 1, including line breaks.

    Raises:
        GTPOError: ``error``, as in :func:`read_bytes`; the size limit applies to lines.
    """
    with _opened(path, error) as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                raise error(f"{printable(path)}:{number}: a line of more than {MAX_LINE_BYTES} bytes")
            yield number, line


def reason(problem: Exception) -> str:
    """The operating system's message, without number and path."""
    return printable(problem.strerror if isinstance(problem, OSError) and problem.strerror else problem)


@contextmanager
def _opened(path: Path, error: type[GTPOError]) -> Iterator[BinaryIO]:
    """Opens a regular file; OSErrors in the block are converted to ``error``."""
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            raise error(f"{printable(path)}: is {_KINDS.get(stat.S_IFMT(mode), 'no regular file')}, expected a file")
        with path.open("rb") as file:
            yield file
    except (FileNotFoundError, NotADirectoryError) as problem:
        raise error(f"{printable(path)}: cannot be read: no such file") from problem
    except (OSError, ValueError) as problem:
        if isinstance(problem, GTPOError):
            raise
        raise error(f"{printable(path)}: cannot be read: {reason(problem)}") from problem


MAX_NAME_BYTES = 255
"""Longest name on common file systems."""


def bare_name(name: object, where: str, error: type[GTPOError] = DataError) -> str:
    """Checks that a name does not lead out of its folder, and returns it.

    Args:
        name: name of a file or folder.
        where: place for messages.
        error: class of errors raised.

    Raises:
        GTPOError: ``error``: it is not text, empty, a path, ``.`` or ``..``, too long, or has control characters.
    """
    if not isinstance(name, str) or not name:
        raise error(f"{where}: got {shown(name)}, expected a name")
    if "/" in name or "\\" in name or name in (".", ".."):
        raise error(f"{where}: got {shown(name)}, expected a bare name, which leads into no other folder")
    if not name.isprintable() or len(name.encode()) > MAX_NAME_BYTES:
        raise error(
            f"{where}: got {shown(name)}, expected a name of at most {MAX_NAME_BYTES} bytes without control characters"
        )
    return name
