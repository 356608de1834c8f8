"""Fills a rank's parts of the model from a model folder of either format."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gtpo_megatron.actor.checkpoint.converted import load_converted
from gtpo_megatron.actor.model.policy_model import weights_by_name
from gtpo_megatron.actor.model.transformer_config import padded_vocab_size
from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.weights.architecture import Architecture
from gtpo_megatron.weights.conversion import converted_weights
from gtpo_megatron.weights.hf.reader import read_parameters
from gtpo_megatron.weights.reshard import hf_shapes, load_plan, shard_coordinates


def load_model_folder(
    folder: Path, arch: Architecture, parallel: ParallelConfig, chunks: Sequence[Any], *, global_rank: int
) -> None:
    """Loads this rank's part of the weights.

    Args:
        folder: in Hugging Face format, or converted.
        arch: of the model.
        parallel: the layout.
        chunks: the rank's parts of the model, in order.
        global_rank: of this process.

    Raises:
        ConfigError: the folder has no usable weights.
        WeightMappingError: its tensors are not the model's.
        CheckpointError: its converted weights are damaged.

    Collectives: of a converted folder Megatron's own over the world.
    """
    converted = converted_weights(folder)
    if converted is not None:
        load_converted(converted, chunks)
        return
    plan = load_plan(arch, shard_coordinates(parallel, global_rank), padded_vocab_size(arch, parallel))
    read_parameters(folder, hf_shapes(arch), plan, weights_by_name(chunks))
