"""A rank's part of a checkpoint: model, optimizer, schedule and random states as one Megatron dist checkpoint."""

import queue
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch.distributed.checkpoint.api import CheckpointException

from gtpo_megatron.errors import CheckpointError


def save(folder: Path, *, chunks: Sequence[Any], optimizer: Any, schedule: Any, num_updates: int) -> None:
    """Writes this rank's shards into an existing, empty folder.

    Raises:
        CheckpointError: the disk is full or not writable; the folder is then unusable and must be dropped.

    Collectives: Megatron's own over the world.
    """
    _hand_results_over_in_process()
    try:
        dist_checkpointing.save(_state(chunks, optimizer, schedule, num_updates, is_loading=False), str(folder))
    except (OSError, RuntimeError, CheckpointException) as error:
        free_gib = shutil.disk_usage(folder).free / 2**30 if folder.exists() else 0.0
        raise CheckpointError(
            f"checkpoint {folder} could not be written ({free_gib:.2f} GiB free): {error}; earlier ones stay valid"
        ) from error


def load(folder: Path, *, chunks: Sequence[Any], optimizer: Any, schedule: Any) -> int:
    """Restores what ``save`` wrote.

    Returns:
        The number of optimizer updates made so far.

    Raises:
        CheckpointError: missing, truncated, or of another model.

    Collectives: Megatron's own over the world.
    """
    _ensure_adam_state(optimizer)
    wanted = _state(chunks, optimizer, schedule, 0, is_loading=True)
    try:
        state = dist_checkpointing.load(wanted, str(folder), strict=StrictHandling.RAISE_ALL)
    except (Exception, CheckpointException) as error:  # torch's is no Exception
        raise CheckpointError(f"checkpoint {folder} cannot be loaded: {type(error).__name__}: {error}") from error
    for index, chunk in enumerate(chunks):
        chunk.load_state_dict(state["model"][str(index)])
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    torch.set_rng_state(state["random"]["torch"])
    get_cuda_rng_tracker().set_states(state["random"]["tracker"])
    return int(state["num_updates"])


def _hand_results_over_in_process() -> None:
    """Gives Megatron's writer a queue of this process.

    It would start an interpreter for a queue between processes, seconds and 200 MiB a rank, which only an asynchronous
    save needs; a synchronous one puts and gets in the same process.
    """
    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()


def _state(
    chunks: Sequence[Any], optimizer: Any, schedule: Any, num_updates: int, *, is_loading: bool
) -> dict[str, Any]:
    metadata = {
        # the only form of a sharded optimizer that loads into every layout
        "distrib_optim_sharding_type": "fully_reshardable",
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    # layers are numbered in the whole model, so it does not matter which chunk of which rank holds them
    model_state = {str(index): chunk.sharded_state_dict(metadata=metadata) for index, chunk in enumerate(chunks)}
    return {
        "model": model_state,
        "optimizer": optimizer.sharded_state_dict(model_state, is_loading=is_loading, metadata=metadata),
        "schedule": schedule.state_dict(),
        "random": _random_states(),
        "num_updates": num_updates,
    }


def _random_states() -> ShardedObject:
    """One entry a (pipeline stage, tensor rank); data-parallel replicas hold the same."""
    states = {"torch": torch.get_rng_state(), "tracker": get_cuda_rng_tracker().get_states()}
    place = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    extent = (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    return ShardedObject(
        "random", states, extent, place, replica_id=parallel_state.get_data_parallel_rank(with_context_parallel=True)
    )


def _ensure_adam_state(optimizer: Any) -> None:
    """Gives a fresh optimizer the zeroed moments that a state dict to load into must have."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner: Any = getattr(part, "optimizer", None)
        for group in inner.param_groups if inner is not None else []:
            for parameter in group["params"]:
                if not inner.state[parameter]:
                    inner.state[parameter] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(parameter.data),
                        "exp_avg_sq": torch.zeros_like(parameter.data),
                    }
