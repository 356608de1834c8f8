"""What a rank trains: its chunks of the model with their weights, adapters if there are any, optimizer and schedule."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from torch import Tensor

from gtpo_megatron.actor import optimizer
from gtpo_megatron.actor.checkpoint.model_folder import load_model_folder
from gtpo_megatron.actor.model.adapters import Adapters, WholeAdapter, join_adapters, new_adapter
from gtpo_megatron.actor.model.frozen_shards import FrozenShards
from gtpo_megatron.actor.model.policy_model import (
    PolicyModel,
    build_chunks,
    fuse_weight_gradients,
    mark_experts,
    mark_sinks,
    parameters_by_name,
    weights_by_name,
)
from gtpo_megatron.actor.model.transformer_config import torch_dtype, transformer_config
from gtpo_megatron.actor.reference import FrozenReference, ReferencePolicy, first_reference
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.weights.architecture import Architecture
from gtpo_megatron.weights.peft import PeftFolder


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A rank's part of the model, ready to be trained.

    Attributes:
        chunks: parts of the model on this rank, in order; the last one of the last pipeline rank has the output layer.
        wrapped: the chunks in Megatron's data-parallel wrapper.
        adapters: None: every weight is trained.
        frozen: the weights below them, where replicas share them; None: each has all of its part.
        reference: the policy that the live one is compared with, or, below adapters, the frozen weights; if any.
        optimizer: Megatron's.
        schedule: schedule of the learning rate.
    """

    chunks: list[PolicyModel]
    wrapped: list[Any]
    adapters: Adapters | None
    frozen: FrozenShards | None
    reference: ReferencePolicy | FrozenReference | None
    optimizer: Any
    schedule: Any

    def weights(self) -> Mapping[str, Tensor]:
        """This rank's weights, by the names of the weight plans; adapters are merged in.

        Of those that replicas share only what is gathered can be read: ``FrozenShards.in_turns``.
        """
        found = weights_by_name(self.chunks)
        return found if self.adapters is None else self.adapters.merged(found)


def trained_model(config: RunConfig, arch: Architecture, *, global_rank: int) -> TrainedModel:
    """Builds a rank's part of the model and fills it from the model's folder.

    Raises:
        ConfigError: the folder, the reference's or the adapters' cannot be used.
        WeightMappingError: tensors are not the model's.
        CheckpointError: converted weights are damaged.

    Collectives: group creation; of a converted folder Megatron's own; with a reference policy or adapters one gather of
    texts over the world.
    """
    parallel, adapter = config.parallel, config.adapter
    transformer = transformer_config(arch, config.model, parallel)
    chunks = build_chunks(arch, config.model, parallel, transformer, adapted=adapter.is_on, shared=adapter.shard_frozen)
    mark_experts(chunks)
    mark_sinks(chunks)
    fuse_weight_gradients(chunks)
    frozen = FrozenShards(chunks, parameters_by_name(chunks)) if adapter.shard_frozen else None

    def load(folder: Path) -> None:
        load_model_folder(folder, arch, parallel, chunks, frozen, global_rank=global_rank)

    reference: ReferencePolicy | FrozenReference | None = None
    adapters = None
    if adapter.is_on:
        load(Path(config.model.path))
        adapters = join_adapters(
            chunks, arch, adapter, parallel, global_rank=global_rank, whole=_whole_adapters(config, arch)
        )
        reference = FrozenReference(adapters.switched_off, Path(config.model.path))
    else:
        reference = first_reference(config, arch, load, lambda: weights_by_name(chunks))
        if reference is None or config.reference.path:
            load(Path(config.model.path))
    wrapping = DistributedDataParallelConfig(
        use_distributed_optimizer=parallel.distributed_optimizer, grad_reduce_in_fp32=True
    )
    wrapped = [DistributedDataParallel(transformer, wrapping, chunk) for chunk in chunks]
    transformer.finalize_model_grads_func = finalize_model_grads
    # of what is trained: asked for masters of bfloat16 weights Megatron's optimizer cannot save float32 adapters
    dtype = torch.float32 if adapter.dtype == "float32" else torch_dtype(config.model)
    made = optimizer.build_optimizer(config.optimizer, wrapped, dtype=dtype, distributed=parallel.distributed_optimizer)
    transformer.grad_scale_func = made.scale_loss
    schedule = optimizer.build_schedule(config.optimizer, made, num_updates=config.num_updates)
    return TrainedModel(chunks, wrapped, adapters, frozen, reference, made, schedule)


def _whole_adapters(config: RunConfig, arch: Architecture) -> WholeAdapter:
    new = partial(new_adapter, config=config.adapter, seed=config.seed)
    if not config.adapter.path:
        return new
    folder = PeftFolder(Path(config.adapter.path), arch, config.adapter)
    return lambda projection: folder.read(projection) if folder.has(projection) else new(projection)
