"""The header of a GGUF file: its keys, and where its tensors are. Anybody's file is read within its own bounds.

::

    "GGUF"  version  number of tensors  number of keys
    key     type  value              of every key
    name    dimensions  type  offset  of every tensor
    padding, then the tensors
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gtpo_megatron.errors import ConfigError
from gtpo_megatron.untrusted.text import check_file, printable, shown

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32
"""Of the tensors in bytes, where the file says nothing else."""

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Type of a value -> its format in ``struct``."""
_FLOAT32, _TEXT, _LIST = 6, 8, 9
_MAX_DIMENSIONS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class GGUFTensor:
    """A tensor of a GGUF file.

    Attributes:
        shape: rows first, as in PyTorch; GGUF has columns first.
        type_id: number of the quantization, ``gguf.GGMLQuantizationType``.
        offset: place of its first byte in the file.
    """

    shape: tuple[int, ...]
    type_id: int
    offset: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """What a GGUF file says before its tensors.

    Attributes:
        path: path of the file.
        num_bytes: size of the whole file.
        keys: key -> number, text, boolean or list of them. Float32 numbers are the shortest decimals that round to
            them: 9.9999997e-06 is 1e-05 again.
        tensors: name -> where it is.
    """

    path: Path
    num_bytes: int
    keys: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]


def read_header(path: Path) -> Header:
    """Reads the header of a GGUF file.

    Raises:
        ConfigError: no such file, no GGUF, a version that is not known, or a header that is damaged or cut short.
    """
    check_file(path, error=ConfigError)
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        if (begin := file.read(len(MAGIC))) != MAGIC:
            raise ConfigError(f"{printable(path)}: begins with {begin!r}, expected {MAGIC!r}: not a GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            try:
                keys, tensors = _parsed(_Reader(content, len(MAGIC)))
            except (struct.error, ValueError) as error:
                raise ConfigError(
                    f"{printable(path)}: a damaged GGUF file ({printable(error)}); fetch it again"
                ) from error
    return Header(path=path, num_bytes=num_bytes, keys=keys, tensors=tensors)


class _Reader:
    """Reads values one after another.

    Args:
        content: the whole file.
        position: place of the next byte.
    """

    def __init__(self, content: mmap.mmap, position: int) -> None:
        self.content, self.position = content, position

    @property
    def left(self) -> int:
        """Bytes behind the position."""
        return len(self.content) - self.position

    def unpack(self, format_: str) -> tuple[Any, ...]:
        """Values in the format of ``struct``, little-endian.

        Raises:
            struct.error: the file ends before.
        """
        form = struct.Struct(f"<{format_}")
        found = form.unpack_from(self.content, self.position)
        self.position += form.size
        return found

    def text(self) -> str:
        """A length and so many bytes of UTF-8.

        Raises:
            ValueError: it is longer than the file, or not UTF-8.
        """
        (length,) = self.unpack("Q")
        if length > self.left:
            raise ValueError(f"a text of {length} bytes at {self.position}, {self.left} are left")
        found = self.content[self.position : self.position + length].decode()
        self.position += length
        return found

    def value(self, kind: int) -> Any:
        """A value of a key.

        Raises:
            ValueError: its type is not known, or it is longer than the file.
        """
        if kind == _TEXT:
            return self.text()
        if kind == _LIST:
            return self._list()
        if kind not in _SCALARS:
            raise ValueError(f"a value of type {kind} at {self.position}")
        (found,) = self.unpack(_SCALARS[kind])
        return _shortest(found) if kind == _FLOAT32 else found

    def _list(self) -> list[Any]:
        kind, count = self.unpack("IQ")
        if kind == _TEXT and count <= self.left // 8:  # every text has a length of 8 bytes
            return [self.text() for _ in range(count)]
        if kind not in _SCALARS or count > self.left:
            raise ValueError(f"a list of {count} values of type {kind} at {self.position}, {self.left} bytes are left")
        found = self.unpack(f"{count}{_SCALARS[kind]}")
        return [_shortest(one) for one in found] if kind == _FLOAT32 else list(found)


def _parsed(reader: _Reader) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    version, num_tensors, num_keys = reader.unpack("IQQ")
    if version not in VERSIONS:
        raise ValueError(f"version {version}, expected {' or '.join(map(str, VERSIONS))} of little-endian numbers")
    keys: dict[str, Any] = {}
    for _ in range(num_keys):
        key = reader.text()
        (kind,) = reader.unpack("I")
        if key in keys:
            raise ValueError(f"key {shown(key)} twice")
        keys[key] = reader.value(kind)
    tensors: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(num_tensors):
        name = reader.text()
        (num_dimensions,) = reader.unpack("I")
        if name in tensors or not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise ValueError(f"tensor {shown(name)} twice, or of {num_dimensions} dimensions")
        columns_first = reader.unpack(f"{num_dimensions}Q")
        tensors[name] = (columns_first[::-1], *reader.unpack("IQ"))
    alignment = keys.get("general.alignment", ALIGNMENT)
    if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
        raise ValueError(f"general.alignment={shown(alignment)}")
    begin = -(-reader.position // alignment) * alignment
    return keys, {
        name: GGUFTensor(shape=shape, type_id=type_id, offset=begin + offset)
        for name, (shape, type_id, offset) in tensors.items()
    }


def _shortest(number: float) -> float:
    """The decimal with the fewest digits that float32 rounds to this number."""
    stored = struct.pack("<f", number)
    for digits in range(1, 10):
        found = float(f"{number:.{digits}g}")
        try:
            if struct.pack("<f", found) == stored:
                return found
        except OverflowError:  # rounded up beyond the largest
            continue
    return number
