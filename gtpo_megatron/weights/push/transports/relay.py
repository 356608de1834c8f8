"""Buckets to workers that share their GPUs with ranks: between ranks over the network, and on inside each GPU.

NCCL refuses two members on one GPU, and a process that sees one GPU cannot open memory of another. So each worker has a
host, the rank of its number, on its GPU. The other ranks send their parts to the host in the ranks' own process group;
what they send, and what the host packs, lands in slots that the worker reads as its own memory: CUDA IPC on a GPU, a
file on the memory file system elsewhere. Nothing is copied on the way to the worker.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from gtpo_megatron.weights.push.link import SLOTS, Meeting, SharedSlots
from gtpo_megatron.weights.push.transports.channel import Spans, wait_until
from gtpo_megatron.weights.push.transports.gpu_slots import open_gpu_slots, share_gpu_slots
from gtpo_megatron.weights.push.transports.process_group import ProcessGroupSender, receive, wait_for
from gtpo_megatron.weights.push.transports.shared_memory import SlotFile

_HOST = 0
"""Index of the counter of buckets written: the host is the only writer."""


class RelaySender:
    """A rank's end: sends to other workers' hosts, and hosts the worker of its own number, if there is one.

    Args:
        rank: number of this process.
        meeting: meeting point of the ranks, without workers.
        slots: worker -> where its slots are.
        partners: ranks that this one sends to or receives from.
    """

    def __init__(
        self, rank: int, meeting: Meeting, slots: Mapping[int, SharedSlots], partners: Collection[int]
    ) -> None:
        self._rank, self._meeting = rank, meeting
        self._outgoing = ProcessGroupSender(rank, meeting, partners)
        self._file = SlotFile(slots[rank]) if rank in slots else None
        self._slots: Tensor | None = None
        self._incoming: dict[int, dict[int, Any]] = {}

    def start(self) -> None:
        """Joins the ranks' group at the first push."""
        self._outgoing.start()

    def slot(self, worker: int, sequence: int, spans: Spans) -> Tensor:
        """For the host a view of the worker's slot, which others' parts come into meanwhile; else memory to send."""
        if worker != self._rank:
            return self._outgoing.slot(worker, sequence, spans)
        slot = self._free_slot(sequence)
        self._incoming[sequence] = {
            rank: receive(
                self._outgoing.group(),
                slot[first : first + num],
                rank,
                sequence,
                self._meeting,
                self._missing(sequence, rank),
            )
            for rank, (first, num) in spans.items()
            if rank != self._rank
        }
        first, num = spans.get(self._rank, (0, 0))
        return slot[first : first + num]

    def commit(self, worker: int, sequence: int, spans: Spans) -> None:
        """Sends. The host publishes a bucket at once if no other rank has a part of it, else when it needs a slot."""
        if worker != self._rank:
            self._outgoing.commit(worker, sequence, spans)
        elif list(self._incoming.values()) == [{}]:  # an earlier bucket that is not whole must be handed over first
            self._hand_over(sequence)

    def finish(self) -> None:
        """Waits until everything has been sent and published."""
        self._hand_over_up_to(max(self._incoming, default=-1))
        self._outgoing.finish()

    def close(self) -> None:
        """Leaves the group and releases the slots."""
        self._outgoing.close()
        self._file = self._slots = None

    def _free_slot(self, sequence: int) -> Tensor:
        assert self._file is not None
        file = self._file
        self._hand_over_up_to(sequence - SLOTS)
        wait_until(
            lambda: sequence - int(file.read) < SLOTS,
            deadline_s=file.shape.deadline_s,
            complaint=lambda: (
                f"transport relay, rank {self._rank}: worker {self._rank} has read {int(file.read)} buckets and did "
                f"not make room for bucket {sequence}"
            ),
        )
        if self._slots is None:
            self._slots = share_gpu_slots(file) if file.shape.on_gpu else file.memory
        return self._slots[sequence % SLOTS]

    def _hand_over_up_to(self, last: int) -> None:
        for sequence in sorted(self._incoming):
            if sequence <= last:
                self._hand_over(sequence)

    def _hand_over(self, sequence: int) -> None:
        """Waits for the other ranks' parts and marks the bucket as complete."""
        assert self._file is not None
        for rank, work in self._incoming.pop(sequence).items():
            wait_for(work, self._meeting, self._missing(sequence, rank))
        if self._file.shape.on_gpu:  # what this rank packed is in the slot, not only on its way
            torch.cuda.current_stream().synchronize()
        self._file.written[_HOST] = sequence + 1

    def _missing(self, sequence: int, rank: int) -> str:
        return f"rank {self._rank}: bucket {sequence} for worker {self._rank} did not come from rank {rank}"


class RelayReceiver:
    """A worker's end.

    Args:
        worker: number of this process's worker.
        slots: slots of this worker.
    """

    def __init__(self, worker: int, slots: SharedSlots) -> None:
        self._worker = worker
        self._file: SlotFile | None = SlotFile(slots)
        self._slots: Tensor | None = None

    def wait(self, sequence: int, spans: Spans) -> Tensor:
        """A view of the slot."""
        file = self._opened()
        wait_until(
            lambda: int(file.written[_HOST]) > sequence,
            deadline_s=file.shape.deadline_s,
            complaint=lambda: (
                f"transport relay, worker {self._worker}: bucket {sequence} did not come from rank {self._worker}, "
                f"which passes on the parts of {', '.join(f'rank {rank}' for rank in sorted(spans))},"
            ),
        )
        if self._slots is None:
            self._slots = open_gpu_slots(file) if file.shape.on_gpu else file.memory
        return self._slots[sequence % SLOTS]

    def release(self, sequence: int) -> None:
        """Raises the worker's counter."""
        file = self._opened()
        if file.shape.on_gpu:  # the copies out of the slot are done, not only on their way
            torch.cuda.current_stream().synchronize()
        file.read[0] = sequence + 1

    def close(self) -> None:
        """Releases the slots."""
        self._file = self._slots = None

    def _opened(self) -> SlotFile:
        assert self._file is not None
        return self._file
