"""Buckets over a network: gloo between CPUs, NCCL between GPUs, in a process group of the push's own.

The group holds every trainer rank and then every worker; it is neither Megatron's world nor vLLM's. It is joined at the
first push, when both sides are known to be there. A rank packs into two buffers in turn and sends them in the
background; a worker has the next bucket's receives under way while it reads this one.

NCCL opens a communicator of two members when they first talk, and both wait in it for each other without a deadline. So
members open all their connections when they join, under a deadline of ours.
"""

import datetime
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # public, but not in its list

from gtpo_megatron.distributed.rendezvous import bound_store
from gtpo_megatron.errors import WeightSyncError
from gtpo_megatron.weights.push.link import SLOTS, Meeting
from gtpo_megatron.weights.push.transports.channel import Spans


def open_store(host: str, *, deadline_s: float) -> TCPStore:
    """The store that a group meets at, on a free port of this address alone; it lives as long as the object."""
    return bound_store(host, timeout=datetime.timedelta(seconds=deadline_s))


def join(meeting: Meeting, member: int) -> Any:
    """The process group, once every member is there.

    Raises:
        WeightSyncError: not all came by the deadline.
    """
    size, timeout = meeting.size, datetime.timedelta(seconds=meeting.deadline_s)
    try:
        store = PrefixStore("weights", TCPStore(meeting.host, meeting.port, None, is_master=False, timeout=timeout))
        if meeting.backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            return dist.ProcessGroupNCCL(store, member, size, options)
        return dist.ProcessGroupGloo(store, member, size, timeout)
    except (RuntimeError, ValueError) as error:
        raise WeightSyncError(
            f"transport {meeting.transport}: member {member} of {size} could not join at {meeting.host}:{meeting.port} "
            f"within {meeting.deadline_s:g} s: {error}"
        ) from error


_OPENING = 2**31 - 1
"""Tag of the byte that opens a connection."""


def opening_order(member: int, partners: Collection[int], size: int) -> list[int]:
    """A member's partners, in the order in which it opens its connections.

    All members follow one order of pairs, so that no two wait for each other; pairs of the same sum modulo ``size``
    have no member in common and open at the same time.
    """
    return sorted(partners, key=lambda partner: ((member + partner) % size, min(member, partner)))


def open_connections(group: Any, meeting: Meeting, member: int, partners: Collection[int]) -> None:
    """Opens the connections of a member with everyone it sends to or receives from.

    Raises:
        WeightSyncError: not all are open by the deadline; the message names the member that did not come.

    Communication: one byte with each partner.
    """
    order, num_open = opening_order(member, partners, meeting.size), 0
    failures: list[RuntimeError] = []
    byte = torch.zeros(1, dtype=torch.uint8, device=meeting.device)
    end = time.monotonic() + meeting.deadline_s

    def open_all() -> None:
        nonlocal num_open
        try:
            for partner in order:
                transfer = group.send if member < partner else group.recv
                work = transfer([byte], partner, _OPENING)
                work.wait(datetime.timedelta(seconds=max(0.001, end - time.monotonic())))
                num_open += 1
        except RuntimeError as error:
            failures.append(error)

    # a thread, since NCCL itself gives up for no deadline; if it does not return, the process is of no use any more
    thread = threading.Thread(target=open_all, name="open weight connections", daemon=True)
    thread.start()
    thread.join(meeting.deadline_s)
    if num_open < len(order):
        raise WeightSyncError(
            f"transport {meeting.transport} ({meeting.backend}), {meeting.name_of(member)}: no connection with "
            f"{meeting.name_of(order[num_open])} within {meeting.deadline_s:g} s, {num_open} of {len(order)} are open"
            f"{f': {failures[0]}' if failures else ''}; the sampler must not be used"
        )


class ProcessGroupSender:
    """The sending end.

    Args:
        rank: number of this process.
        meeting: meeting point of the group.
        partners: members that this one sends to or receives from.
    """

    def __init__(self, rank: int, meeting: Meeting, partners: Collection[int]) -> None:
        self._rank, self._meeting, self._partners = rank, meeting, partners
        self._group: Any = None
        self._buffers = [torch.empty(0, dtype=torch.uint8) for _ in range(SLOTS)]
        self._pending: list[tuple[int, int, Any] | None] = [None] * SLOTS
        self._turn = 0

    def start(self) -> None:
        """Joins the group at the first push."""
        self.group()

    def slot(self, worker: int, sequence: int, spans: Spans) -> Tensor:
        """A buffer of this process whose previous contents have been sent."""
        del worker, sequence
        self._settle(self._turn)
        _, num = spans[self._rank]
        if self._buffers[self._turn].numel() < num:
            self._buffers[self._turn] = torch.empty(num, dtype=torch.uint8, device=self._meeting.device)
        return self._buffers[self._turn][:num]

    def commit(self, worker: int, sequence: int, spans: Spans) -> None:
        """Sends in the background."""
        _, num = spans[self._rank]
        part = self._buffers[self._turn][:num]
        work = post(
            lambda: self.group().send([part], self._meeting.member_for(worker), sequence % 2**31),
            self._meeting,
            f"rank {self._rank}: worker {worker} did not take bucket {sequence}",
        )
        self._pending[self._turn] = (worker, sequence, work)
        self._turn = (self._turn + 1) % SLOTS

    def group(self) -> Any:
        """The process group, joined when it is first asked for."""
        if self._group is None:
            self._group = join(self._meeting, self._rank)
            open_connections(self._group, self._meeting, self._rank, self._partners)
        return self._group

    def finish(self) -> None:
        """Waits until everything has been sent."""
        for turn in range(SLOTS):
            self._settle(turn)

    def close(self) -> None:
        """Leaves the group."""
        self._group = None

    def _settle(self, turn: int) -> None:
        if (pending := self._pending[turn]) is None:
            return
        worker, sequence, work = pending
        self._pending[turn] = None
        wait_for(work, self._meeting, f"rank {self._rank}: worker {worker} did not take bucket {sequence}")


class ProcessGroupReceiver:
    """A worker's end.

    Args:
        worker: number of this process's worker.
        meeting: meeting point of the group.
        buckets: the spans of every bucket of one push, so that receives can be under way before they are waited for.
    """

    def __init__(self, worker: int, meeting: Meeting, buckets: Sequence[dict[int, tuple[int, int]]]) -> None:
        self._worker, self._meeting, self._buckets = worker, meeting, buckets
        self._group: Any = None
        self._buffers: list[Tensor] = []
        self._under_way: dict[int, dict[int, Any]] = {}

    def wait(self, sequence: int, spans: Spans) -> Tensor:
        """Waits for the receives; returns the buffer they wrote to."""
        if self._group is None:
            self._join()
        self._receive(sequence)
        if (sequence + 1) % len(self._buckets):  # not into the next push, which may never come
            self._receive(sequence + 1)
        for rank, work in self._under_way.pop(sequence).items():
            wait_for(work, self._meeting, f"worker {self._worker}: bucket {sequence} did not come from rank {rank}")
        del spans
        return self._buffers[sequence % SLOTS]

    def release(self, sequence: int) -> None:
        """Allows the receives after the next ``wait`` to overwrite the buffer."""

    def close(self) -> None:
        """Leaves the group."""
        self._group, self._buffers = None, []

    def _join(self) -> None:
        member = self._meeting.num_ranks + self._worker
        self._group = join(self._meeting, member)
        open_connections(self._group, self._meeting, member, {rank for spans in self._buckets for rank in spans})
        largest = max((first + num for spans in self._buckets for first, num in spans.values()), default=0)
        self._buffers = [torch.empty(largest, dtype=torch.uint8, device=self._meeting.device) for _ in range(SLOTS)]

    def _receive(self, sequence: int) -> None:
        if sequence in self._under_way:
            return
        slot, spans = self._buffers[sequence % SLOTS], self._buckets[sequence % len(self._buckets)]
        self._under_way[sequence] = {
            rank: receive(
                self._group,
                slot[first : first + num],
                rank,
                sequence,
                self._meeting,
                f"worker {self._worker}: bucket {sequence} did not come from rank {rank}",
            )
            for rank, (first, num) in spans.items()
        }


def post(start: Callable[[], Any], meeting: Meeting, complaint: str) -> Any:
    """Starts a send or a receive.

    Raises:
        WeightSyncError: the other side has gone; ``complaint`` makes the message.
    """
    try:
        return start()
    except RuntimeError as error:
        raise WeightSyncError(
            f"transport {meeting.transport} ({meeting.backend}), {complaint}: {error}; the sampler must not be used"
        ) from error


def receive(group: Any, memory: Tensor, rank: int, sequence: int, meeting: Meeting, complaint: str) -> Any:
    """Starts to receive a part of a bucket.

    Raises:
        WeightSyncError: the rank has gone; ``complaint`` makes the message.
    """
    return post(lambda: group.recv([memory], rank, sequence % 2**31), meeting, complaint)


def wait_for(work: Any, meeting: Meeting, complaint: str) -> None:
    """Waits for one send or receive, on a GPU until its bytes can be read.

    Raises:
        WeightSyncError: not done by the deadline; ``complaint`` makes the message.
    """
    try:
        work.wait(datetime.timedelta(seconds=meeting.deadline_s))
    except RuntimeError as error:
        raise WeightSyncError(
            f"transport {meeting.transport} ({meeting.backend}), {complaint} within {meeting.deadline_s:g} s: {error}; "
            f"the sampler must not be used"
        ) from error
    if meeting.backend == "nccl":
        torch.cuda.current_stream().synchronize()
