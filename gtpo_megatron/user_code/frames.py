"""What goes over the pipe between a pool and its workers.

A session is a series of calls of the user's code that stay in one worker: the turns of an episode of an environment, or
the one call of a reward function. Each call has one answer. A frame is plain JSON behind a header, so nothing that a
worker sends can run code in the pool's process.
"""

import struct
from enum import IntEnum
from typing import NamedTuple

from gtpo_megatron.errors import DataError

LARGEST_FRAME = 1 << 30
"""Bytes of a body; a header that names more is none."""

_HEADER = struct.Struct("!IBq")  # length of the body, kind, session


class FrameKind(IntEnum):
    """What a frame is."""

    READY = 1
    """A worker has imported the user's code; the body has its process id, or an error."""
    OPEN = 2
    """The pool begins a session with its first call."""
    CALL = 3
    """The pool makes the next call of a session."""
    END = 4
    """The pool has no more calls for the session."""
    BEGUN = 5
    """A worker calls the user's code; the body may have a limit in place of the usual one, and may come later."""
    ANSWER = 6
    """The answer to a call, after which the session waits for the next one."""
    DONE = 7
    """The answer to the last call of a session."""
    FAILED = 8
    """The session has ended with an error; the body has the reason."""
    CLOSED = 9
    """A worker has forgotten the session."""
    RETIRES = 10
    """A worker takes no more sessions: something runs or stays in it that it cannot end. The body has the reason."""


class Frame(NamedTuple):
    """One message over the pipe."""

    kind: FrameKind
    session: int
    body: bytes


def packed(kind: FrameKind, session: int = 0, body: bytes = b"") -> bytes:
    """A frame as bytes.

    Raises:
        DataError: it is too long.
    """
    if len(body) > LARGEST_FRAME:
        raise DataError(f"{len(body)} bytes of JSON, more than {LARGEST_FRAME}")
    return _HEADER.pack(len(body), kind, session) + body


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
            length, kind, session = _HEADER.unpack_from(self._bytes)
            if length > LARGEST_FRAME or kind not in FrameKind.__members__.values():
                raise DataError(f"the worker sent a frame of kind {kind} and {length} bytes, which is none")
            end = _HEADER.size + length
            if len(self._bytes) < end:
                break
            frames.append(Frame(FrameKind(kind), session, bytes(self._bytes[_HEADER.size : end])))
            del self._bytes[:end]
        return frames
