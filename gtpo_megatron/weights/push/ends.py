"""Opens the two ends of a push: a trainer rank's and a sampler worker's."""

import math
from collections.abc import Mapping, Sequence

import torch

from gtpo_megatron.errors import WeightSyncError
from gtpo_megatron.weights.adapters import tensor_shapes
from gtpo_megatron.weights.architecture import Architecture
from gtpo_megatron.weights.push.link import Endpoint, Meeting, Relay, WeightLink
from gtpo_megatron.weights.push.plan import PushPlan, RankStream, Stream, relay_partners
from gtpo_megatron.weights.push.receiver import WeightReceiver
from gtpo_megatron.weights.push.sender import WeightSender
from gtpo_megatron.weights.push.transports.channel import ReceivingEnd, SendingEnd
from gtpo_megatron.weights.push.transports.process_group import ProcessGroupReceiver, ProcessGroupSender
from gtpo_megatron.weights.push.transports.relay import RelayReceiver, RelaySender
from gtpo_megatron.weights.push.transports.shared_memory import SharedMemoryReceiver, SharedMemorySender
from gtpo_megatron.weights.reshard import hf_shapes


def open_sender(link: WeightLink, rank: int) -> WeightSender:
    """Opens the sending end of a trainer rank."""
    streams = PushPlan(link.arch, link.layout).rank_streams(rank, passes_on=isinstance(link.endpoint, Relay))
    columns = {name: math.prod(shape[1:]) for name, shape in _shapes(link).items()}
    return WeightSender(rank, streams, _sending_end(link.endpoint, rank, streams), dtype=link.dtype, columns=columns)


def open_receiver(link: WeightLink, worker: int, arch: Architecture, device: torch.device) -> WeightReceiver:
    """Opens the receiving end of a sampler worker.

    Args:
        link: link of the run.
        worker: number of the worker over all engines.
        arch: architecture that the worker has loaded.
        device: device of the tensors.

    Raises:
        WeightSyncError: the worker's model is another than the trainer's; the message names what differs.
    """
    check_same_model(link.arch, arch)
    stream = PushPlan(link.arch, link.layout).stream(worker)
    end = _receiving_end(link.endpoint, stream)
    return WeightReceiver(stream, end, shapes=_shapes(link), dtype=link.dtype, device=device)


def _shapes(link: WeightLink) -> Mapping[str, tuple[int, ...]]:
    """Of every tensor that travels."""
    adapter = link.layout.adapter
    return hf_shapes(link.arch) if adapter is None else tensor_shapes(link.arch, adapter)


def _sending_end(endpoint: Endpoint, rank: int, streams: Sequence[RankStream]) -> SendingEnd:
    match endpoint:
        case Meeting() as meeting:
            return ProcessGroupSender(rank, meeting, {meeting.member_for(stream.worker) for stream in streams})
        case Relay(meeting=meeting, slots=slots):
            return RelaySender(rank, meeting, slots, relay_partners(rank, streams))
    return SharedMemorySender(rank, {stream.worker: endpoint[stream.worker] for stream in streams})


def _receiving_end(endpoint: Endpoint, stream: Stream) -> ReceivingEnd:
    worker = stream.target.worker
    match endpoint:
        case Meeting() as meeting:
            return ProcessGroupReceiver(worker, meeting, [bucket.spans for bucket in stream.buckets])
        case Relay(slots=slots):
            return RelayReceiver(worker, slots[worker])
    return SharedMemoryReceiver(worker, endpoint[worker])


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
