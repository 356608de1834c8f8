"""The adapters' part of a checkpoint: A and B of every projection, and in the common state what multiplies them."""

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.parallel_state import get_expert_data_parallel_rank, get_tensor_model_parallel_group
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from gtpo_megatron.actor.model.adapters import Adapters, LowRank
from gtpo_megatron.errors import CheckpointError
from gtpo_megatron.untrusted.fields import Fields
from gtpo_megatron.weights.megatron.adapters import ADAPTERS, ADAPTERS_PREFIX, SCALE


def sharded_adapters(adapters: Adapters, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """A rank's adapters in Megatron's form, by the names that their projections have in the model's folder.

    Args:
        adapters: adapters of this rank.
        metadata: Megatron's, as for a model.
    """
    found: dict[str, Any] = {}
    for part in adapters.parts:
        split, tensors = part.projection.split, part.tensors()
        if part.projection.expert is not None:
            found |= _of_expert(part, adapters.num_experts)
            continue
        axes = {
            name: 1 if name == "a" else 0
            for name in tensors
            if split != "none" and (name == "a") == (split == "columns")
        }
        found |= make_sharded_tensors_for_checkpoint(
            tensors,
            f"{ADAPTERS_PREFIX}{part.projection.name}.",
            axes,
            (),
            tp_group=get_tensor_model_parallel_group(),
            dp_cp_group=metadata["dp_cp_group"],
        )
    return found


def _of_expert(part: LowRank, num_experts: int) -> dict[str, ShardedTensor]:
    """An expert's adapters, which are a part of one tensor of all experts."""
    projection, replica = part.projection, (0, 0, get_expert_data_parallel_rank())
    return {
        _key(part, name): ShardedTensor.from_rank_offsets(
            f"{ADAPTERS_PREFIX}{projection.name}.{name}",
            tensor,
            (0, projection.expert, num_experts),
            replica_id=replica,
            prepend_axis_num=1,
        )
        for name, tensor in part.tensors().items()
    }


def _key(part: LowRank, name: str) -> str:
    """Where a rank's part of a checkpoint has a tensor."""
    expert = part.projection.expert
    return f"{ADAPTERS_PREFIX}{part.projection.name}.{'' if expert is None else f'{expert}.'}{name}"


def check_kind(adapters: Adapters | None, stored: Collection[str], folder: Path) -> None:
    """Raises CheckpointError unless a checkpoint, whose tensors are named, has adapters as the run does."""
    has_adapters = any(name.startswith(ADAPTERS_PREFIX) for name in stored)
    if has_adapters and adapters is None:
        raise CheckpointError(
            f"checkpoint {folder} is of a run that trained adapters, this one trains all weights; resume with its "
            f"--adapter.rank, or begin with what convert megatron-to-hf makes of it"
        )
    if adapters is not None and not has_adapters:
        raise CheckpointError(
            f"checkpoint {folder} is of a run that trained all weights, this one trains adapters; resume with "
            f"--adapter.rank 0, or begin with what convert megatron-to-hf makes of it"
        )


@torch.no_grad()
def restore_adapters(adapters: Adapters, state: Mapping[str, Any], folder: Path) -> None:
    """Takes a rank's adapters from a loaded checkpoint.

    Args:
        adapters: adapters of this rank.
        state: all that was loaded.
        folder: for messages.

    Raises:
        CheckpointError: the checkpoint's are multiplied by something else.
    """
    scale = Fields(state, f"checkpoint {folder}", CheckpointError).fields(ADAPTERS).get(SCALE, float)
    if not math.isclose(scale, adapters.scale, rel_tol=1e-6):
        raise CheckpointError(
            f"checkpoint {folder} is of adapters times {scale:g}, this run multiplies them by {adapters.scale:g}; "
            f"resume with its adapter.alpha and adapter.scaling"
        )
    for part in adapters.parts:
        for name, parameter in part.tensors().items():
            parameter.copy_(state["model"][ADAPTERS][_key(part, name)])
