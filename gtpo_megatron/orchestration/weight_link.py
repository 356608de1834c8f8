"""Connects trainer and sampler for pushes: who holds which weights, who wants them, and the transport between them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from gtpo_megatron.actor.place import RankPlace
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.weights.architecture import read_architecture
from gtpo_megatron.weights.link import Endpoint, SharedFolder, WeightLink, wire_dtype
from gtpo_megatron.weights.param_mapping import TensorParallel
from gtpo_megatron.weights.push_plan import PushLayout, SourceRank, TargetWorker
from gtpo_megatron.weights.reshard import ShardPlace
from gtpo_megatron.weights.transports.process_group import Meeting
from gtpo_megatron.weights.transports.shared_memory import SharedSlots

MIB = 1 << 20


class TrainerSide(Protocol):
    """All ranks together."""

    def places(self) -> Sequence[tuple[RankPlace, str]]:
        """Every rank's place and host."""
        ...

    def padded_vocab_size(self) -> int:
        """Rows of the embedding over all tensor-parallel ranks."""
        ...

    def open_weight_store(self, deadline_s: float) -> tuple[str, int]:
        """Host and port of a store that both sides can meet at."""
        ...

    def connect_weights(self, link: WeightLink) -> None:
        """Every rank opens its end."""
        ...


class SamplerSide(Protocol):
    """All engines together."""

    def hosts(self) -> Sequence[str]:
        """Of every engine."""
        ...

    def open_slots(self, *, slot_bytes: int, num_ranks: int, deadline_s: float) -> Mapping[int, SharedSlots]:
        """Shared memory for every worker, on its machine."""
        ...

    def connect_weights(self, link: WeightLink) -> None:
        """Every worker opens its end."""
        ...

    def remove_slot_names(self) -> None:
        """Both sides have mapped the slots: their memory shall go when the processes go."""
        ...


def connect(
    config: RunConfig, run_folder: Path, trainer: TrainerSide, sampler: SamplerSide, *, has_gpus: bool
) -> WeightLink:
    """Opens both ends of the run's pushes.

    Raises:
        WeightMappingError: the layouts cannot be mapped onto each other; names the tensor.
        WeightSyncError: the sampler runs another model, or there is no memory for the buckets.
    """
    sync = config.weight_sync
    layout = _layout(config, trainer, sampler)
    endpoint: Endpoint
    match sync.transport:
        case "shared_memory":
            endpoint = dict(
                sampler.open_slots(
                    slot_bytes=layout.bucket_bytes, num_ranks=len(layout.sources), deadline_s=sync.deadline_s
                )
            )
        case "process_group":
            host, port = trainer.open_weight_store(sync.deadline_s)
            endpoint = Meeting(
                host=host,
                port=port,
                num_ranks=len(layout.sources),
                num_workers=len(layout.targets),
                backend="nccl" if has_gpus else "gloo",
                deadline_s=sync.deadline_s,
            )
        case "files":
            endpoint = SharedFolder(path=str(run_folder.resolve() / "weights"), deadline_s=sync.deadline_s)
    link = WeightLink(
        arch=read_architecture(Path(config.model.path)),
        layout=layout,
        dtype_name=wire_dtype(config.model.dtype, config.rollout.dtype),
        endpoint=endpoint,
    )
    try:
        sampler.connect_weights(link)
        trainer.connect_weights(link)
    finally:
        if sync.transport == "shared_memory":
            sampler.remove_slot_names()
    return link


def _layout(config: RunConfig, trainer: TrainerSide, sampler: SamplerSide) -> PushLayout:
    parallel, size = config.parallel, config.rollout.tensor_parallel_size
    sources = tuple(
        SourceRank(
            rank=place.global_rank,
            place=ShardPlace(
                tensor_parallel=TensorParallel(parallel.tensor_parallel_size, place.tensor_index),
                pipeline_size=parallel.pipeline_parallel_size,
                pipeline_stage=place.pipeline_index,
                virtual_size=parallel.virtual_pipeline_size,
            ),
            host=host,
        )
        for place, host in trainer.places()
    )
    targets = tuple(
        TargetWorker(worker=engine * size + index, tensor_parallel=TensorParallel(size, index), host=host)
        for engine, host in enumerate(sampler.hosts())
        for index in range(size)
    )
    itemsize = 4 if wire_dtype(config.model.dtype, config.rollout.dtype) == "float32" else 2
    return PushLayout(
        sources=sources,
        targets=targets,
        padded_vocab_size=trainer.padded_vocab_size(),
        itemsize=itemsize,
        bucket_bytes=config.weight_sync.bucket_mib * MIB,
        same_host=config.weight_sync.transport == "shared_memory",
    )
