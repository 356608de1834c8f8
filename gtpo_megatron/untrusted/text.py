"""The bytes and the text of a file, or one line on why there are none."""

import reprlib
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from gtpo_megatron.errors import DataError, GTPOError

MAX_BYTES = 256 << 20
"""Of a file that is read at once; a checkpoint's index of a model with a million tensors has 100 MB."""
MAX_LINE_BYTES = 64 << 20
"""Of a line; a response of 100,000 tokens with its numbers has 4 MB."""
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
    """A value in one line, short enough for a message."""
    try:
        text = repr(value[: MAX_SHOWN + 1]) if isinstance(value, str) else _SHORT.repr(value)
    except ValueError:  # an integer of more digits than Python writes
        return "a number of thousands of digits"
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def printable(text: object) -> str:
    """Text in one line: a path, or another program's message; line breaks and other controls as escapes or blanks."""
    words = " ".join(str(text).split())
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in words)


def read_bytes(path: Path, *, limit: int = MAX_BYTES, error: type[GTPOError] = DataError) -> bytes:
    """The whole file.

    Args:
        path: of a regular file; a device or a pipe could go on for ever.
        limit: in bytes.
        error: to raise.

    Raises:
        GTPOError: ``error``: no such file, something else than a file, one that cannot be read, or is too large.
    """
    with _opened(path, error) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise error(f"{printable(path)}: is larger than {limit} bytes, the most that is read of such a file")
    return content


def find_bytes(path: Path, *, limit: int = MAX_BYTES, error: type[GTPOError] = DataError) -> bytes | None:
    """As :func:`read_bytes`; None where there is no such file."""
    try:
        return read_bytes(path, limit=limit, error=error)
    except GTPOError as problem:
        if isinstance(problem.__cause__, FileNotFoundError | NotADirectoryError):
            return None
        raise


def check_file(path: Path, *, error: type[GTPOError] = DataError) -> None:
    """Whether a library that is to open the file could: its own message would be of another kind, or wrong.

    Raises:
        GTPOError: ``error``, as in :func:`read_bytes`.
    """
    with _opened(path, error):
        pass


def read_text(path: Path, *, limit: int = MAX_BYTES, error: type[GTPOError] = DataError) -> str:
    """As :func:`read_bytes`, decoded; a byte order mark is left out."""
    return decoded(read_bytes(path, limit=limit, error=error), printable(path), error)


def find_text(path: Path, *, limit: int = MAX_BYTES, error: type[GTPOError] = DataError) -> str | None:
    """As :func:`read_text`; None where there is no such file."""
    content = find_bytes(path, limit=limit, error=error)
    return None if content is None else decoded(content, printable(path), error)


def decoded(content: bytes, place: str, error: type[GTPOError] = DataError) -> str:
    """UTF-8 with or without a byte order mark as text.

    Raises:
        GTPOError: ``error``: it is something else.
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
    """The lines of a file, from number 1, each with its line break if it has one; one at a time in memory.

    Raises:
        GTPOError: ``error``, as in :func:`read_bytes`; a line, and not the file, is limited in size.
    """
    with _opened(path, error) as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                raise error(f"{printable(path)}:{number}: a line of more than {MAX_LINE_BYTES} bytes")
            yield number, line


def reason(problem: Exception) -> str:
    """What the operating system says, without number and path."""
    return printable(problem.strerror if isinstance(problem, OSError) and problem.strerror else problem)


@contextmanager
def _opened(path: Path, error: type[GTPOError]) -> Iterator[BinaryIO]:
    """A regular file, open; what goes wrong with it in the block is the caller's error."""
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
