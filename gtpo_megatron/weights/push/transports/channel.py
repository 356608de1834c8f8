"""What a transport offers to both ends of a push, and how an end waits without hanging.

Buckets to a worker are numbered over all pushes: bucket ``b`` of the ``k``-th push of a stream of ``n`` buckets has the
sequence ``k * n + b``. Two buckets a worker are under way at most: a rank may fill bucket ``s`` while the worker reads
``s - 1``, and waits for the worker to let go of ``s - 2``.
"""

import time
from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from gtpo_megatron.errors import WeightSyncError

SLOTS = 2
"""Buckets to a worker that are under way at a time: one is packed while the other is unpacked."""

Spans = Mapping[int, tuple[int, int]]
"""Rank -> first byte of its part of a bucket, and number of bytes; ranks without a part are absent."""

_FIRST_NAP_S, _LONGEST_NAP_S = 2e-5, 1e-3


class SendingEnd(Protocol):
    """A trainer rank's end."""

    def start(self) -> None:
        """Opens a push. Every rank calls it, also one that no worker wants anything from.

        Raises:
            WeightSyncError: somebody did not come by the deadline.
        """
        ...

    def is_needed(self, worker: int, spans: Spans) -> bool:
        """Whether this rank takes part in a bucket: a part of it is here, or it passes on what others send."""
        ...

    def slot(self, worker: int, sequence: int, spans: Spans) -> Tensor:
        """Memory for this rank's part of a bucket, waiting until it is free.

        Args:
            worker: who the bucket is for.
            sequence: of the bucket.
            spans: of the bucket.

        Returns:
            ``[bytes]`` uint8, to be overwritten; empty if this rank has no part.

        Raises:
            WeightSyncError: the worker did not let go of an earlier bucket by the deadline.
        """
        ...

    def commit(self, worker: int, sequence: int, spans: Spans) -> None:
        """This rank's part is complete."""
        ...

    def finish(self) -> None:
        """Returns when nothing of this push needs this rank any more."""
        ...

    def close(self) -> None:
        """Lets go of memory and connections."""
        ...


class ReceivingEnd(Protocol):
    """A sampler worker's end."""

    def wait(self, sequence: int, spans: Spans) -> Tensor:
        """The bucket, once every rank's part is there.

        Args:
            sequence: of the bucket.
            spans: of the bucket.

        Returns:
            ``[bytes]`` uint8, valid until ``release``.

        Raises:
            WeightSyncError: a rank's part did not come by the deadline; the message names the rank.
        """
        ...

    def release(self, sequence: int) -> None:
        """The bucket has been read."""
        ...

    def close(self) -> None:
        """Lets go of memory and connections."""
        ...


def wait_until(is_done: Callable[[], bool], *, deadline_s: float, complaint: Callable[[], str]) -> None:
    """Polls, first often and then every millisecond.

    Raises:
        WeightSyncError: not done by the deadline; says what ``complaint`` says.
    """
    if is_done():
        return
    end, nap = time.monotonic() + deadline_s, _FIRST_NAP_S
    while not is_done():
        if time.monotonic() > end:
            raise WeightSyncError(f"{complaint()} within {deadline_s:g} s; the sampler must not be used")
        time.sleep(nap)
        nap = min(2 * nap, _LONGEST_NAP_S)
