"""The connection between trainer ranks and sampler workers, as values that travel to every process of both.

The driver makes them; ``ends.py`` opens a process's end.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from gtpo_megatron.weights.architecture import Architecture
from gtpo_megatron.weights.push.layout import PushLayout

SLOTS = 2
"""Buckets to a worker that are under way at a time: one is packed while the other is unpacked."""

PAGE_BYTES = 4096
"""Of the memory: counters and handles have pages of their own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotShape:
    """Sizes and kind of a worker's slots.

    Attributes:
        slot_bytes: size of one slot, the largest bucket.
        num_ranks: number of ranks that write.
        deadline_s: longest time an end waits for the other.
        on_gpu: the slots themselves are in a GPU's memory.
    """

    slot_bytes: int
    num_ranks: int
    deadline_s: float
    on_gpu: bool = False

    @property
    def header_bytes(self) -> int:
        """Bytes of the counters, in whole pages."""
        return -(-8 * (1 + self.num_ranks) // PAGE_BYTES) * PAGE_BYTES

    @property
    def num_bytes(self) -> int:
        """Bytes of the file."""
        return self.header_bytes + (PAGE_BYTES if self.on_gpu else SLOTS * self.slot_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedSlots:
    """Location of a worker's slots.

    Attributes:
        path: path of the file.
        shape: sizes and kind.
    """

    path: str
    shape: SlotShape


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """Rendezvous of the group's members.

    Attributes:
        host: host of the store.
        port: port of the store.
        num_ranks: trainer ranks.
        num_workers: sampler workers; 0 if ranks pass on to them what others send.
        backend: ``gloo`` or ``nccl``.
        deadline_s: longest time a member waits for another.
    """

    host: str
    port: int
    num_ranks: int
    num_workers: int
    backend: str
    deadline_s: float

    @property
    def device(self) -> torch.device:
        """Device of the buffers."""
        return torch.device("cuda", torch.cuda.current_device()) if self.backend == "nccl" else torch.device("cpu")

    @property
    def size(self) -> int:
        """Members of the group."""
        return self.num_ranks + self.num_workers

    def name_of(self, member: int) -> str:
        """A member, for messages."""
        return f"rank {member}" if member < self.num_ranks else f"worker {member - self.num_ranks}"

    @property
    def transport(self) -> str:
        """Name of the transport in the configuration."""
        return "process_group" if self.num_workers else "relay"

    def member_for(self, worker: int) -> int:
        """Member of the group that receives a worker's buckets: the worker, or the rank of the same number."""
        return self.num_ranks + worker if self.num_workers else worker


@dataclass(frozen=True, kw_only=True, slots=True)
class Relay:
    """Meeting point of the ranks, and the slots in which each of them passes buckets on to the worker on its GPU.

    Attributes:
        meeting: meeting point of the ranks.
        slots: slots of each worker, with one writer: the rank of the same number.
    """

    meeting: Meeting
    slots: Mapping[int, SharedSlots]


Endpoint = Mapping[int, SharedSlots] | Meeting | Relay
"""What a transport needs to know: each worker's slots, a network meeting point, or both."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightLink:
    """Both sides of every push of a run.

    Attributes:
        arch: architecture of the model, on both sides.
        layout: holders and takers of every part of the model.
        dtype_name: dtype of elements on the wire.
        endpoint: endpoint of the transport.
    """

    arch: Architecture
    layout: PushLayout
    dtype_name: str
    endpoint: Endpoint

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of elements on the wire."""
        found = getattr(torch, self.dtype_name)
        assert isinstance(found, torch.dtype)
        return found
