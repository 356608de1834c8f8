"""What goes over the pipe between an environment pool and its workers: frames of bounded length.

A frame is plain JSON behind a header, so nothing that a worker sends can run code in the engine's process.
"""

import struct
from enum import IntEnum
from typing import NamedTuple

from gtpo_megatron.errors import DataError

MAX_FRAME_BYTES = 4 << 20
"""Most bytes of a row, a message, an opening or a reply; more than a context holds."""

_HEADER = struct.Struct("!IBq")  # length of the body, kind, episode


class Kind(IntEnum):
    """What a frame is."""

    READY = 1
    """A worker has imported the environment; the body has its process id, or an error."""
    OPEN = 2
    """The pool begins an episode; the body is a row."""
    STEP = 3
    """The pool has a message of the policy."""
    END = 4
    """The pool has no more messages for the episode."""
    BEGUN = 5
    """A worker calls the environment now."""
    OPENING = 6
    REPLY = 7
    FAILED = 8
    """The body says why, and the seconds."""
    CLOSED = 9
    """A worker has forgotten the episode."""
    RETIRES = 10
    """A worker takes no more episodes: something runs or stays in it that it cannot end. The body says what."""


class Frame(NamedTuple):
    """One message over the pipe."""

    kind: Kind
    episode: int
    body: bytes


def packed(kind: Kind, episode: int = 0, body: bytes = b"") -> bytes:
    """A frame as bytes.

    Raises:
        DataError: it is too long.
    """
    if len(body) > MAX_FRAME_BYTES:
        raise DataError(f"{len(body)} bytes of JSON, more than {MAX_FRAME_BYTES}")
    return _HEADER.pack(len(body), kind, episode) + body


class FrameReader:
    """Makes frames of the bytes that arrive."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that are complete with these bytes.

        Raises:
            DataError: they are no frames.
        """
        self._bytes += data
        frames: list[Frame] = []
        while len(self._bytes) >= _HEADER.size:
            length, kind, episode = _HEADER.unpack_from(self._bytes)
            if length > MAX_FRAME_BYTES or kind not in Kind.__members__.values():
                raise DataError(f"the worker sent a frame of kind {kind} and {length} bytes, which is none")
            end = _HEADER.size + length
            if len(self._bytes) < end:
                break
            frames.append(Frame(Kind(kind), episode, bytes(self._bytes[_HEADER.size : end])))
            del self._bytes[:end]
        return frames
