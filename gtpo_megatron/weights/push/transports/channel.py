"""The interface that a transport gives to both ends of a push, and a wait that cannot hang.

Buckets to a worker are numbered over all pushes: bucket ``b`` of the ``k``-th push of a stream of ``n`` buckets has the
sequence ``k * n + b``. Two buckets a worker are under way at most: a rank may fill bucket ``s`` while the worker reads
``s - 1``, and waits for the worker to let go of ``s - 2``.
"""

import time
from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from gtpo_megatron.errors import WeightSyncError

Spans = Mapping[int, tuple[int, int]]
"""Rank -> first byte of its part of a bucket, and number of bytes; ranks without a part are absent."""

_FIRST_NAP_S, _LONGEST_NAP_S = 2e-5, 1e-3


class SendingEnd(Protocol):
    """The sending end, of a trainer rank."""

    def start(self) -> None:
        """Opens a push. Every rank must call it, also one without anything to send.

        Raises:
            WeightSyncError: a member did not join by the deadline.
        """
        ...

    def slot(self, worker: int, sequence: int, spans: Spans) -> Tensor:
        """Waits for free memory for this rank's part of a bucket.

        Args:
            worker: destination of the bucket.
            sequence: number of the bucket.
            spans: places of the ranks' slices in it.

        Returns:
            ``[bytes]`` uint8, to be overwritten; empty if this rank has no part.

        Raises:
            WeightSyncError: the worker did not let go of an earlier bucket by the deadline.
        """
        ...

    def commit(self, worker: int, sequence: int, spans: Spans) -> None:
        """Marks this rank's part as complete."""
        ...

    def finish(self) -> None:
        """Waits until this rank's part of the push is delivered."""
        ...

    def close(self) -> None:
        """Releases memory and connections."""
        ...


class ReceivingEnd(Protocol):
    """The receiving end, of a sampler worker."""

    def wait(self, sequence: int, spans: Spans) -> Tensor:
        """Waits for every rank's part of a bucket, and returns the bucket.

        Args:
            sequence: number of the bucket.
            spans: places of the ranks' slices in it.

        Returns:
            ``[bytes]`` uint8, valid until ``release``.

        Raises:
            WeightSyncError: a rank's part did not come by the deadline; the message names the rank.
        """
        ...

    def release(self, sequence: int) -> None:
        """Marks the bucket as read."""
        ...

    def close(self) -> None:
        """Releases memory and connections."""
        ...


def wait_until(is_done: Callable[[], bool], *, deadline_s: float, complaint: Callable[[], str]) -> None:
    """Polls, first often and then every millisecond.

    Raises:
        WeightSyncError: not done by the deadline; ``complaint`` makes the message.
    """
    if is_done():
        return
    end, nap = time.monotonic() + deadline_s, _FIRST_NAP_S
    while not is_done():
        if time.monotonic() > end:
            raise WeightSyncError(f"{complaint()} within {deadline_s:g} s; the sampler must not be used")
        time.sleep(nap)
        nap = min(2 * nap, _LONGEST_NAP_S)
