"""Both sides of a push: who holds which shards, and who wants which part of the model."""

import re
from dataclasses import dataclass
from typing import Literal

from gtpo_megatron.config.adapter import AdapterConfig
from gtpo_megatron.config.parallel import LayerSplit, engine_layers
from gtpo_megatron.errors import WeightMappingError
from gtpo_megatron.weights.architecture import Architecture
from gtpo_megatron.weights.param_mapping import TensorParallel
from gtpo_megatron.weights.reshard import EMBEDDING, ShardCoordinates

SenderPolicy = Literal["same_host", "anywhere", "own_rank_first"]

_LAYER = re.compile(r"model\.layers\.(\d+)\.")

ALIGNMENT_BYTES = 64
"""Start of every slice in a bucket, one cache line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceRank:
    """A trainer rank that can send.

    Attributes:
        rank: number in the trainer's world.
        coordinates: shards that it holds.
        host: the machine it is on.
    """

    rank: int
    coordinates: ShardCoordinates
    host: str = ""


@dataclass(frozen=True, slots=True)
class WorkerCoordinates:
    """Decides which part of the model a worker keeps: equal for all that keep the same.

    Attributes:
        tensor_parallel: index among the workers of its engine that share its layers.
        expert_parallel: the worker keeps whole experts, as many as each of those, in place of its rows and columns of
            every expert.
        pipeline_size: stages of its engine.
        pipeline_stage: its own.
    """

    tensor_parallel: TensorParallel
    expert_parallel: bool = False
    pipeline_size: int = 1
    pipeline_stage: int = 0

    def layers(self, num_layers: int) -> range:
        """Numbers of the layers that it keeps."""
        return engine_layers(num_layers, self.pipeline_size, self.pipeline_stage)

    def keeps(self, hf_name: str, arch: Architecture) -> bool:
        """Whether it keeps any of a Hugging Face tensor, but for how experts are shared."""
        is_first, is_last = self.pipeline_stage == 0, self.pipeline_stage == self.pipeline_size - 1
        if (layer := _LAYER.match(hf_name)) is not None:
            return int(layer[1]) in self.layers(arch.num_layers)
        if hf_name == EMBEDDING:
            return is_first or (is_last and arch.tied_embeddings)
        return is_last  # the last norm and the output layer

    def __str__(self) -> str:
        split = self.tensor_parallel
        stage = f" pp{self.pipeline_stage} of {self.pipeline_size}" if self.pipeline_size > 1 else ""
        return f"tp{split.index} of {split.size}{stage}"


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetWorker:
    """A sampler worker that receives.

    Attributes:
        worker: number of the worker over all engines, those of an engine one after the other.
        coordinates: part of the model that it keeps.
        host: the machine it is on.
    """

    worker: int
    coordinates: WorkerCoordinates
    host: str = ""

    def __str__(self) -> str:
        return f"worker {self.worker} ({self.coordinates})"


@dataclass(frozen=True, kw_only=True, slots=True)
class PushLayout:
    """Both sides of a push.

    Attributes:
        sources: every trainer rank.
        targets: every sampler worker.
        padded_vocab_size: rows of the trainer's embedding.
        itemsize: bytes per element on the way, but of tensors that stay float32.
        bucket_bytes: largest bucket.
        sender_policy: ranks that serve a worker. ``same_host``: those on its own machine; ``anywhere``: all;
            ``own_rank_first``: all, but the rank of the worker's number, on whose GPU it is, wherever that holds what
            is wanted.
        adapter: adapters that travel alone, whole to every worker; None: the model's weights travel.
        in_step: the workers of an engine get its layers in the same order, because they agree on something for each:
            the scales of FP8. Parts of one size lie in the same buckets for all of them; only a vocabulary's padding,
            of less than 64 rows, shifts some, which must be less than a bucket.
    """

    sources: tuple[SourceRank, ...]
    targets: tuple[TargetWorker, ...]
    padded_vocab_size: int
    itemsize: int
    bucket_bytes: int
    sender_policy: SenderPolicy = "same_host"
    adapter: AdapterConfig | None = None
    in_step: bool = False

    def target(self, worker: int) -> TargetWorker:
        """The worker of a number."""
        return next(target for target in self.targets if target.worker == worker)


@dataclass(frozen=True, slots=True)
class TrainerShape:
    """Into how many parts the trainer's ranks split the model.

    Attributes:
        tensor: ranks that share a layer's matrices, those of experts excepted.
        pipeline: ranks that share the layers.
        virtual: model chunks of a rank.
        last_stage_layers: layers of the last pipeline rank; None: as many as the others have.
        expert: ranks that share a layer's experts.
        expert_tensor: ranks that share the matrices of an expert.
    """

    tensor: int
    pipeline: int
    virtual: int
    last_stage_layers: int | None
    expert: int
    expert_tensor: int

    @property
    def num_stages(self) -> int:
        """Virtual stages of the whole pipeline."""
        return self.pipeline * self.virtual

    @property
    def layer_split(self) -> LayerSplit:
        """Which layers each virtual stage holds."""
        return LayerSplit(self.pipeline, self.virtual, self.last_stage_layers)


def shape_of(coordinates: ShardCoordinates) -> TrainerShape:
    """The sizes that a rank's coordinates name."""
    return TrainerShape(
        coordinates.tensor_parallel.size,
        coordinates.pipeline_size,
        coordinates.virtual_size,
        coordinates.last_stage_layers,
        coordinates.expert_parallel.size,
        coordinates.expert_tensor_parallel.size,
    )


def trainer_shape(layout: PushLayout) -> TrainerShape:
    """The sizes that all ranks have in common.

    Raises:
        WeightMappingError: two ranks belong to different layouts.
    """
    first = layout.sources[0]
    shape = shape_of(first.coordinates)
    for source in layout.sources:
        if shape_of(source.coordinates) != shape:
            raise WeightMappingError(
                f"rank {source.rank} is of layout {shape_of(source.coordinates)} and rank {first.rank} of {shape}; "
                f"expected one layout for all ranks"
            )
    return shape
