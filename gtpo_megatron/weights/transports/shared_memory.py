"""Buckets through a file on the memory file system that a worker shares with the trainer ranks on its machine.

Layout: one int64 counter for the worker (buckets read) and one a rank (buckets written), then two slots. A counter has
one writer and only grows, so no lock is needed: a rank's bytes are in its slot before its counter says so.
"""

import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gtpo_megatron.errors import WeightSyncError
from gtpo_megatron.weights.transports.channel import SLOTS, wait_until

SHARED_MEMORY = Path("/dev/shm")
"""Where the file lives; a memory file system on every Linux."""

_PAGE_BYTES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedSlots:
    """Where a worker's slots are.

    Attributes:
        path: of the file.
        slot_bytes: of one slot, the largest bucket.
        num_ranks: of the trainer.
        deadline_s: longest time an end waits for the other.
    """

    path: str
    slot_bytes: int
    num_ranks: int
    deadline_s: float

    @property
    def header_bytes(self) -> int:
        """Of the counters, in whole pages."""
        return -(-8 * (1 + self.num_ranks) // _PAGE_BYTES) * _PAGE_BYTES

    @property
    def num_bytes(self) -> int:
        """Of the file."""
        return self.header_bytes + SLOTS * self.slot_bytes


def create_slots(*, slot_bytes: int, num_ranks: int, deadline_s: float) -> SharedSlots:
    """Makes the file with all its memory; one that grows when it is written would kill the writer when memory is short.

    Raises:
        WeightSyncError: the memory file system is too small.
    """
    path = SHARED_MEMORY / f"gtpo_megatron_{uuid.uuid4().hex}"
    slots = SharedSlots(path=str(path), slot_bytes=slot_bytes, num_ranks=num_ranks, deadline_s=deadline_s)
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, slots.num_bytes)
        finally:
            os.close(descriptor)
    except OSError as error:
        remove_name(slots)
        raise WeightSyncError(
            f"no room for {slots.num_bytes / 2**20:.1f} MiB of buckets at {path}: {error.strerror}; enlarge the memory "
            f"file system (for a container: --shm-size) or choose a smaller weight_sync.bucket_mib"
        ) from error
    return slots


def remove_name(slots: SharedSlots) -> None:
    """Unlinks the file; its memory is freed when the last process that mapped it ends, however it ends."""
    Path(slots.path).unlink(missing_ok=True)


class _Mapping:
    """The file, as counters and slots."""

    def __init__(self, slots: SharedSlots) -> None:
        self.slots = slots
        try:
            flat = torch.from_file(slots.path, shared=True, size=slots.num_bytes, dtype=torch.uint8)
        except RuntimeError as error:
            raise WeightSyncError(f"cannot map the weight buckets at {slots.path}: {error}") from error
        counters = flat[: slots.header_bytes].view(torch.int64)
        self.read, self.written = counters[:1], counters[1 : 1 + slots.num_ranks]
        self._slots = flat[slots.header_bytes :].view(SLOTS, slots.slot_bytes)

    def slot(self, sequence: int) -> Tensor:
        return self._slots[sequence % SLOTS]


class SharedMemorySender:
    """A rank's end.

    Args:
        rank: of this process.
        slots: worker -> where its slots are.
    """

    def __init__(self, rank: int, slots: dict[int, SharedSlots]) -> None:
        self._rank = rank
        self._mappings = {worker: _Mapping(where) for worker, where in slots.items()}

    def slot(self, worker: int, sequence: int, span: tuple[int, int]) -> Tensor:
        """A view of the worker's slot."""
        mapping = self._mappings[worker]
        wait_until(
            lambda: sequence - int(mapping.read) < SLOTS,
            deadline_s=mapping.slots.deadline_s,
            complaint=lambda: (
                f"transport shared_memory, rank {self._rank}: worker {worker} has read {int(mapping.read)} buckets and "
                f"did not make room for bucket {sequence}"
            ),
        )
        first, num = span
        return mapping.slot(sequence)[first : first + num]

    def commit(self, worker: int, sequence: int, span: tuple[int, int]) -> None:
        """Raises this rank's counter."""
        del span
        self._mappings[worker].written[self._rank] = sequence + 1

    def finish(self) -> None:
        """What was committed lies in shared memory."""

    def close(self) -> None:
        """Unmaps."""
        self._mappings.clear()


class SharedMemoryReceiver:
    """A worker's end."""

    def __init__(self, worker: int, slots: SharedSlots) -> None:
        self._worker = worker
        self._mapping: _Mapping | None = _Mapping(slots)

    def wait(self, sequence: int, spans: dict[int, tuple[int, int]]) -> Tensor:
        """A view of the slot."""
        mapping, ranks = self._connected(), torch.tensor(sorted(spans))
        wait_until(
            lambda: bool((mapping.written[ranks] > sequence).all()),
            deadline_s=mapping.slots.deadline_s,
            complaint=lambda: (
                f"transport shared_memory, worker {self._worker}: bucket {sequence} did not come from "
                f"{_names(ranks[mapping.written[ranks] <= sequence].tolist())}"
            ),
        )
        return mapping.slot(sequence)

    def release(self, sequence: int) -> None:
        """Raises the worker's counter."""
        self._connected().read[0] = sequence + 1

    def close(self) -> None:
        """Unmaps."""
        self._mapping = None

    def _connected(self) -> _Mapping:
        assert self._mapping is not None
        return self._mapping


def _names(ranks: Sequence[int]) -> str:
    return ", ".join(f"rank {rank}" for rank in ranks)
