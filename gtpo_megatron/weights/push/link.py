"""The connection between trainer ranks and sampler workers, as a value that travels to every process of both."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from gtpo_megatron.errors import WeightSyncError
from gtpo_megatron.weights.adapters import tensor_shapes
from gtpo_megatron.weights.architecture import Architecture
from gtpo_megatron.weights.push.layout import PushLayout
from gtpo_megatron.weights.push.plan import PushPlan, RankStream, Stream, relay_partners
from gtpo_megatron.weights.push.receiver import WeightReceiver
from gtpo_megatron.weights.push.sender import WeightSender
from gtpo_megatron.weights.push.transports.channel import ReceivingEnd, SendingEnd
from gtpo_megatron.weights.push.transports.process_group import Meeting, ProcessGroupReceiver, ProcessGroupSender
from gtpo_megatron.weights.push.transports.relay import RelayReceiver, RelaySender
from gtpo_megatron.weights.push.transports.shared_memory import SharedMemoryReceiver, SharedMemorySender, SharedSlots
from gtpo_megatron.weights.reshard import hf_shapes


@dataclass(frozen=True, kw_only=True, slots=True)
class Relay:
    """Meeting point of the ranks, and the slots in which each of them passes buckets on to the worker on its GPU.

    Attributes:
        meeting: of the ranks.
        slots: by worker, each with one writer: the rank of the same number.
    """

    meeting: Meeting
    slots: Mapping[int, SharedSlots]


Endpoint = Mapping[int, SharedSlots] | Meeting | Relay
"""What a transport needs to know: each worker's slots, a network meeting point, or both."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightLink:
    """Both sides of every push of a run.

    Attributes:
        arch: of the model, on both sides.
        layout: who holds and who wants what.
        dtype_name: dtype of elements on the wire.
        endpoint: of the transport.
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

    def sender(self, rank: int) -> WeightSender:
        """Opens the sending end of a trainer rank."""
        streams = PushPlan(self.arch, self.layout).rank_streams(rank, passes_on=isinstance(self.endpoint, Relay))
        columns = {name: math.prod(shape[1:]) for name, shape in self._shapes().items()}
        return WeightSender(rank, streams, self._sending_end(rank, streams), dtype=self.dtype, columns=columns)

    def receiver(self, worker: int, arch: Architecture, device: torch.device) -> WeightReceiver:
        """Opens the receiving end of a sampler worker.

        Args:
            worker: its number over all engines.
            arch: of the model that the worker has loaded.
            device: where its tensors are made.

        Raises:
            WeightSyncError: the worker's model is another than the trainer's; the message names what differs.
        """
        check_same_model(self.arch, arch)
        stream = PushPlan(self.arch, self.layout).stream(worker)
        end = self._receiving_end(stream)
        return WeightReceiver(stream, end, shapes=self._shapes(), dtype=self.dtype, device=device)

    def _shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of every tensor that travels."""
        adapter = self.layout.adapter
        return hf_shapes(self.arch) if adapter is None else tensor_shapes(self.arch, adapter)

    def _sending_end(self, rank: int, streams: Sequence[RankStream]) -> SendingEnd:
        match self.endpoint:
            case Meeting() as meeting:
                return ProcessGroupSender(rank, meeting, {meeting.member_for(stream.worker) for stream in streams})
            case Relay(meeting=meeting, slots=slots):
                return RelaySender(rank, meeting, slots, relay_partners(rank, streams))
        return SharedMemorySender(rank, {stream.worker: self.endpoint[stream.worker] for stream in streams})

    def _receiving_end(self, stream: Stream) -> ReceivingEnd:
        worker = stream.target.worker
        match self.endpoint:
            case Meeting() as meeting:
                return ProcessGroupReceiver(worker, meeting, [bucket.spans for bucket in stream.buckets])
            case Relay(slots=slots):
                return RelayReceiver(worker, slots[worker])
        return SharedMemoryReceiver(worker, self.endpoint[worker])


def check_same_model(trainer: Architecture, sampler: Architecture) -> None:
    """Raises WeightSyncError unless both sides have the same tensors."""
    if trainer == sampler:
        return
    ours, theirs = hf_shapes(trainer), hf_shapes(sampler)
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        if ours.get(name) != theirs.get(name):
            raise WeightSyncError(
                f"the sampler runs another model than the trainer: {name} is {ours.get(name, 'absent')} here and "
                f"{theirs.get(name, 'absent')} there; give both the same model.path"
            )
