"""The adapters' part of a checkpoint: A and B of every projection, and the scale with which they are merged."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from gtpo_megatron.actor.model.adapters import Adapters
from gtpo_megatron.errors import CheckpointError
from gtpo_megatron.weights.megatron.adapters import ADAPTERS_PREFIX, SCALE_KEY

ADAPTERS = "adapters"
"""Takes the place of a chunk's number in the sharded state of the model."""


def sharded_adapters(adapters: Adapters, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """A rank's adapters in Megatron's form, by the names that their projections have in the model's folder.

    Args:
        adapters: of this rank.
        metadata: Megatron's, as for a model.
    """
    tensors: dict[str, Tensor] = {"scale": torch.tensor([adapters.scale])}
    axes: dict[str, int] = {}
    for part in adapters.parts:
        name, splits_rows = part.projection.name, part.projection.splits_rows
        tensors |= {f"{name}.a": part.a, f"{name}.b": part.b}
        axes |= {f"{name}.b": 0} if splits_rows else {f"{name}.a": 1}
    found: dict[str, Any] = make_sharded_tensors_for_checkpoint(
        tensors,
        ADAPTERS_PREFIX,
        axes,
        (),
        tp_group=get_tensor_model_parallel_group(),
        dp_cp_group=metadata["dp_cp_group"],
    )
    return found


@torch.no_grad()
def restore_adapters(adapters: Adapters, state: Mapping[str, Tensor], folder: Path) -> None:
    """Copies loaded values into a rank's adapters.

    Raises:
        CheckpointError: the checkpoint's are multiplied by something else.
    """
    if not math.isclose(float(state[SCALE_KEY]), adapters.scale, rel_tol=1e-6):
        raise CheckpointError(
            f"checkpoint {folder} is of adapters times {float(state[SCALE_KEY]):g}, this run multiplies them by "
            f"{adapters.scale:g}; resume with its adapter.alpha and adapter.scaling"
        )
    for part in adapters.parts:
        for name, parameter in (("a", part.a), ("b", part.b)):
            parameter.copy_(state[f"{ADAPTERS_PREFIX}{part.projection.name}.{name}"])
