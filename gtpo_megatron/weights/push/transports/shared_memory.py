"""Buckets through a file on the memory file system that a worker shares with the trainer ranks on its machine.

Layout: one int64 counter for the worker (buckets read) and one per rank (buckets written), then two slots, or a page
with a handle if the slots are in a GPU's memory. A counter has one writer and only grows, so no lock is needed: a
rank's bytes are in its slot before its counter says so.
"""

import mmap
import os
import uuid
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from gtpo_megatron.errors import WeightSyncError
from gtpo_megatron.weights.push.link import PAGE_BYTES, SLOTS, SharedSlots, SlotShape
from gtpo_megatron.weights.push.transports.channel import Spans, wait_until

SHARED_MEMORY = Path("/dev/shm")
"""Where the file lives; a memory file system on every Linux."""

_created: dict[str, mmap.mmap] = {}
"""Path -> first page of the files whose names this process has made: a sweep removes what nobody has mapped."""


def create_slots(shape: SlotShape) -> SharedSlots:
    """Creates the file and allocates all its memory: a sparse file would kill its writer if memory ran out.

    This process has it mapped until ``remove_name``, or another run that ends meanwhile would remove it.

    Raises:
        WeightSyncError: the memory file system is too small.
    """
    path = SHARED_MEMORY / f"gtpo_megatron_{uuid.uuid4().hex}"
    slots = SharedSlots(path=str(path), shape=shape)
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, PAGE_BYTES)
            _created[slots.path] = mmap.mmap(descriptor, PAGE_BYTES)  # first, since the rest may take a second
            os.posix_fallocate(descriptor, 0, shape.num_bytes)
        finally:
            os.close(descriptor)
    except OSError as error:
        remove_name(slots)
        raise WeightSyncError(
            f"no room for {shape.num_bytes / 2**20:.1f} MiB of buckets at {path}: {error.strerror}; enlarge the memory "
            f"file system (for a container: --shm-size) or choose a smaller weight_sync.bucket_mib"
        ) from error
    return slots


def remove_name(slots: SharedSlots) -> None:
    """Unlinks the file; its memory is freed when the last process that mapped it ends, however it ends."""
    Path(slots.path).unlink(missing_ok=True)
    if slots.path in _created:
        _created.pop(slots.path).close()


class SlotFile:
    """The file, mapped.

    Attributes:
        shape: shape of the slots.
        read: ``[1]`` int64, buckets that the worker has read.
        written: ``[ranks]`` int64, buckets that each rank has written.
        memory: ``[slots, bytes]`` uint8; empty if the slots are in a GPU's memory.
    """

    def __init__(self, slots: SharedSlots) -> None:
        self.shape = shape = slots.shape
        try:
            flat = torch.from_file(slots.path, shared=True, size=shape.num_bytes, dtype=torch.uint8)
        except RuntimeError as error:
            raise WeightSyncError(f"cannot map the weight buckets at {slots.path}: {error}") from error
        counters = flat[: shape.header_bytes].view(torch.int64)
        self.read, self.written = counters[:1], counters[1 : 1 + shape.num_ranks]
        self._handle = flat[shape.header_bytes :] if shape.on_gpu else flat[:0]
        self.memory = flat[:0] if shape.on_gpu else flat[shape.header_bytes :].view(SLOTS, shape.slot_bytes)

    def publish(self, handle: bytes) -> None:
        """Stores a handle of the slots for other processes that map the file."""
        data = torch.frombuffer(bytearray(len(handle).to_bytes(8, "little") + handle), dtype=torch.uint8)
        self._handle[: len(data)] = data

    def published(self) -> bytes:
        """The stored handle."""
        page = bytes(self._handle.tolist())
        return page[8 : 8 + int.from_bytes(page[:8], "little")]


class SharedMemorySender:
    """A rank's end.

    Args:
        rank: number of this process.
        slots: worker -> where its slots are.
    """

    def __init__(self, rank: int, slots: dict[int, SharedSlots]) -> None:
        self._rank = rank
        self._files = {worker: SlotFile(where) for worker, where in slots.items()}

    def start(self) -> None:
        """Does nothing."""

    def slot(self, worker: int, sequence: int, spans: Spans) -> Tensor:
        """A view of this rank's part in the worker's slot."""
        file = self._files[worker]
        wait_until(
            lambda: sequence - int(file.read) < SLOTS,
            deadline_s=file.shape.deadline_s,
            complaint=lambda: (
                f"transport shared_memory, rank {self._rank}: worker {worker} has read {int(file.read)} buckets and "
                f"did not make room for bucket {sequence}"
            ),
        )
        first, num = spans[self._rank]
        return file.memory[sequence % SLOTS][first : first + num]

    def commit(self, worker: int, sequence: int, spans: Spans) -> None:
        """Raises this rank's counter."""
        del spans
        self._files[worker].written[self._rank] = sequence + 1

    def finish(self) -> None:
        """Does nothing: what was committed is in shared memory."""

    def close(self) -> None:
        """Unmaps the files."""
        self._files.clear()


class SharedMemoryReceiver:
    """The receiving end."""

    def __init__(self, worker: int, slots: SharedSlots) -> None:
        self._worker = worker
        self._file: SlotFile | None = SlotFile(slots)

    def wait(self, sequence: int, spans: Spans) -> Tensor:
        """A view of the slot."""
        file, ranks = self._connected(), torch.tensor(sorted(spans))
        wait_until(
            lambda: bool((file.written[ranks] > sequence).all()),
            deadline_s=file.shape.deadline_s,
            complaint=lambda: (
                f"transport shared_memory, worker {self._worker}: bucket {sequence} did not come from "
                f"{_names(ranks[file.written[ranks] <= sequence].tolist())}"
            ),
        )
        return file.memory[sequence % SLOTS]

    def release(self, sequence: int) -> None:
        """Raises the worker's counter."""
        self._connected().read[0] = sequence + 1

    def close(self) -> None:
        """Unmaps the files."""
        self._file = None

    def _connected(self) -> SlotFile:
        assert self._file is not None
        return self._file


def _names(ranks: Sequence[int]) -> str:
    return ", ".join(f"rank {rank}" for rank in ranks)
