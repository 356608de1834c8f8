"""Connects trainer and engines for pushes: the plan of both layouts and the transport."""

from collections.abc import Mapping
from pathlib import Path

from gtpo_megatron.config.model import ELEMENT_BYTES
from gtpo_megatron.config.rollout import RolloutConfig
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.errors import WeightSyncError
from gtpo_megatron.orchestration.stages.engines import Engines
from gtpo_megatron.orchestration.stages.trainer import Trainer
from gtpo_megatron.weights.architecture import VOCAB_MULTIPLE, Architecture
from gtpo_megatron.weights.config_json import read_architecture
from gtpo_megatron.weights.param_mapping import TensorParallel
from gtpo_megatron.weights.push.layout import (
    ALIGNMENT_BYTES,
    PushLayout,
    SenderPolicy,
    SourceRank,
    TargetWorker,
    WorkerCoordinates,
)
from gtpo_megatron.weights.push.link import Endpoint, Meeting, Relay, SharedSlots, SlotShape, WeightLink
from gtpo_megatron.weights.push.transports.shared_memory import remove_name
from gtpo_megatron.weights.push.wire import wire_dtype
from gtpo_megatron.weights.reshard import shard_coordinates

MIB = 1 << 20

_SENDER_POLICY: dict[str, SenderPolicy] = {
    "shared_memory": "same_host",
    "process_group": "anywhere",
    "relay": "own_rank_first",
}


def connect(config: RunConfig, trainer: Trainer, engines: Engines, *, has_gpus: bool) -> WeightLink:
    """Opens both ends of the link for pushes.

    Args:
        config: configuration of the run.
        trainer: the ranks.
        engines: unattended, since whoever opens the link replaces those that die meanwhile.
        has_gpus: both sides are on GPUs.

    Raises:
        EngineLostError: an engine died.
        WeightMappingError: the layouts cannot be mapped onto each other; the message names the tensor.
        WeightSyncError: the sampler has another model, or memory for the buckets is missing.
    """
    arch = read_architecture(Path(config.model.path))
    layout = _layout(config, arch, trainer, engines, has_gpus=has_gpus)
    slots: Mapping[int, SharedSlots] = {}
    try:
        endpoint = _endpoint(config, layout, trainer, engines, has_gpus=has_gpus)
        slots = endpoint.slots if isinstance(endpoint, Relay) else endpoint if isinstance(endpoint, dict) else {}
        link = WeightLink(
            arch=arch,
            layout=layout,
            dtype_name=_dtype(config),
            endpoint=endpoint,
        )
        engines.connect_weights(link)
        trainer.run_on_all("weight_sync", lambda actor: actor.connect_weights(link))
    finally:  # also if only some of the workers have slots
        try:
            if config.transport(has_gpus=has_gpus) in ("shared_memory", "relay"):
                engines.remove_slot_names()
        finally:
            # an engine that died leaves its file, which can be removed if it is on this host
            for left in slots.values():
                remove_name(left)
    return link


def _endpoint(config: RunConfig, layout: PushLayout, trainer: Trainer, engines: Engines, *, has_gpus: bool) -> Endpoint:
    sync = config.weight_sync
    match config.transport(has_gpus=has_gpus):
        case "shared_memory":
            shape = SlotShape(slot_bytes=layout.bucket_bytes, num_ranks=len(layout.sources), deadline_s=sync.deadline_s)
            return dict(engines.open_slots(shape))
        case "process_group":
            if has_gpus and config.rollout.placement == "colocated":
                raise WeightSyncError(
                    "weight_sync.transport='process_group' with rollout.placement='colocated': NCCL refuses a rank "
                    "and a worker on one GPU; use transport='relay'"
                )
            return _meeting(config, trainer, layout, num_workers=len(layout.targets), has_gpus=has_gpus)
        case "relay":
            # a process cannot open its own memory by CUDA IPC, so within one process the host's memory is used
            on_gpu = has_gpus and config.cluster.mode == "ray"
            shape = SlotShape(slot_bytes=layout.bucket_bytes, num_ranks=1, deadline_s=sync.deadline_s, on_gpu=on_gpu)
            meeting = _meeting(config, trainer, layout, num_workers=0, has_gpus=has_gpus)
            return Relay(meeting=meeting, slots=dict(engines.open_slots(shape)))


def _meeting(config: RunConfig, trainer: Trainer, layout: PushLayout, *, num_workers: int, has_gpus: bool) -> Meeting:
    deadline_s = config.weight_sync.deadline_s
    # on rank 0
    ((host, port),) = trainer.ranks.run_on_each("weight_sync", [lambda actor: actor.open_weight_store(deadline_s)])
    return Meeting(
        host=host,
        port=port,
        num_ranks=len(layout.sources),
        num_workers=num_workers,
        backend="nccl" if has_gpus else "gloo",
        deadline_s=deadline_s,
    )


def _layout(config: RunConfig, arch: Architecture, trainer: Trainer, engines: Engines, *, has_gpus: bool) -> PushLayout:
    parallel, rollout = config.parallel, config.rollout
    alone = config.adapter.pushes_alone
    sources = tuple(
        SourceRank(
            rank=rank.global_rank,
            coordinates=shard_coordinates(parallel, rank.global_rank),
            host=host,
        )
        for rank, host in zip(trainer.ranks.coordinates, trainer.ranks.hosts, strict=True)
    )
    targets = tuple(
        TargetWorker(
            worker=worker,
            # vLLM cuts adapters itself
            coordinates=WorkerCoordinates(TensorParallel(1, 0)) if alone else _coordinates(rollout, worker),
            host=host,
        )
        for worker, host in enumerate(engines.hosts)
    )
    itemsize = ELEMENT_BYTES[_dtype(config)]
    return PushLayout(
        sources=sources,
        targets=targets,
        padded_vocab_size=arch.padded_vocab_size(parallel.tensor_parallel_size, VOCAB_MULTIPLE if has_gpus else 1),
        itemsize=itemsize,
        bucket_bytes=_bucket_bytes(config, arch, itemsize),
        sender_policy=_SENDER_POLICY[config.transport(has_gpus=has_gpus)],
        adapter=config.adapter if alone else None,
        in_step=rollout.dtype == "fp8",
    )


def _coordinates(rollout: RolloutConfig, worker: int) -> WorkerCoordinates:
    """Of a worker by its number over all engines; inside an engine the tensor-parallel axis is the fast one."""
    stage, index = divmod(worker % rollout.ranks_per_engine, rollout.tensor_parallel_size)
    split = TensorParallel(rollout.tensor_parallel_size, index)
    return WorkerCoordinates(split, rollout.expert_parallel, rollout.pipeline_parallel_size, stage)


def _dtype(config: RunConfig) -> str:
    """Of elements on the way."""
    alone_in_float32 = config.adapter.pushes_alone and config.adapter.dtype == "float32"
    return wire_dtype("float32" if alone_in_float32 else config.model.dtype, config.rollout.activation_dtype)


def _bucket_bytes(config: RunConfig, arch: Architecture, itemsize: int) -> int:
    """As configured; adapters alone are smaller than that as a whole."""
    most = config.weight_sync.bucket_mib * MIB
    if not config.adapter.pushes_alone:
        return most
    from gtpo_megatron.weights.adapters import tensor_shapes

    shapes = tensor_shapes(arch, config.adapter)
    return min(most, sum(itemsize * rows * columns + ALIGNMENT_BYTES for rows, columns in shapes.values()))
