"""Fills a rank's parts of the model from a model folder of either format."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.validation import StrictHandling

from gtpo_megatron.actor.checkpoint.megatron_load import drop_extra_states, load
from gtpo_megatron.actor.model.frozen_shards import FrozenShards
from gtpo_megatron.actor.model.policy_model import weights_by_name
from gtpo_megatron.actor.model.transformer_config import padded_vocab_size
from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.weights.architecture import Architecture
from gtpo_megatron.weights.hf.reader import read_parameters, require_finite
from gtpo_megatron.weights.megatron.checkpoint_files import converted_weights
from gtpo_megatron.weights.reshard import hf_shapes, load_plan, shard_coordinates


def load_model_folder(
    folder: Path,
    arch: Architecture,
    parallel: ParallelConfig,
    chunks: Sequence[Any],
    frozen: FrozenShards | None,
    *,
    global_rank: int,
) -> None:
    """Loads this rank's part of the weights.

    Args:
        folder: in Hugging Face format, or converted.
        arch: architecture of the model.
        parallel: the layout.
        chunks: the rank's parts of the model, in order.
        frozen: the weights that replicas share; None: there are none. A folder in Hugging Face format is read a layer
            at a time, of a converted one the rank has all of its part for a moment.
        global_rank: rank of this process.

    Raises:
        ConfigError: the folder has no usable weights.
        WeightMappingError: its tensors are not the model's.
        CheckpointError: its converted weights are damaged.

    Collectives: of a converted folder Megatron's own over the world.
    """
    converted = converted_weights(folder)
    if converted is not None:
        with nullcontext() if frozen is None else frozen.filled_together():
            load_converted(converted, chunks)
        return
    plan = load_plan(arch, shard_coordinates(parallel, global_rank), padded_vocab_size(arch, parallel))
    weights = weights_by_name(chunks)
    parts = None if frozen is None else frozen.fill(weights)
    read_parameters(folder, hf_shapes(arch), plan, weights, parts=parts)


@torch.no_grad()
def load_converted(checkpoint: Path, chunks: Sequence[Any]) -> None:
    """Loads converted weights, whichever layout they are for; rows that only pad the vocabulary become 0.

    Args:
        checkpoint: Megatron's files.
        chunks: the rank's parts of the model, in order.

    Raises:
        CheckpointError: damaged, or of another model.
        ConfigError: a tensor holds NaN or infinity.

    Collectives: Megatron's own over the world.
    """
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {"singleton_local_shards": False, "dp_cp_group": group}
    wanted: dict[str, dict[str, Any]] = {}
    absent: list[dict[str, None]] = []
    for number, chunk in enumerate(chunks):
        for parameter in chunk.parameters():
            parameter.zero_()  # Megatron leaves the padding that the checkpoint does not have as it is
        wanted[str(number)] = chunk.sharded_state_dict(metadata=metadata)
        absent.append(drop_extra_states(wanted[str(number)]))
    found = load(wanted, checkpoint, strict=StrictHandling.RAISE_ALL)
    for number, chunk in enumerate(chunks):
        chunk.load_state_dict(found[str(number)] | absent[number])
        for name, parameter in chunk.named_parameters():
            require_finite([parameter], name, where=checkpoint)
