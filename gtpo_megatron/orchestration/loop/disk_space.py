"""Checks that a run's checkpoints fit on the disk, before any process starts."""

import logging
import shutil
from pathlib import Path

from gtpo_megatron.config.model import ELEMENT_BYTES
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.weights.adapter_shapes import num_parameters
from gtpo_megatron.weights.architecture import Architecture

logger = logging.getLogger(__name__)

_MOMENT_BYTES = 8
"""Adam's two moments, float32."""
_MASTER_BYTES = 4
"""Float32 master weights of bfloat16 models and of the distributed optimizer."""
_GIB = 2**30


def checkpoint_bytes(config: RunConfig, architecture: Architecture) -> int:
    """Size of one checkpoint: weights, master weights if any, Adam's moments; weights of a reference that is reset.

    The weights are those that are trained: of adapters these alone.
    """
    adapter, dtype = config.adapter, config.model.dtype
    if adapter.is_on:
        parameters = num_parameters(architecture, adapter)
        dtype = dtype if adapter.dtype == "model" else adapter.dtype
    else:
        parameters = architecture.num_parameters
    has_masters = dtype != "float32" or config.parallel.distributed_optimizer
    num_policies = 2 if config.reference.reset_every_steps else 1
    return parameters * (num_policies * ELEMENT_BYTES[dtype] + _MOMENT_BYTES + (_MASTER_BYTES if has_masters else 0))


def check_disk_space(config: RunConfig, architecture: Architecture, run_folder: Path, *, used_bytes: int) -> None:
    """Checks that free space suffices for the checkpoints kept, one being written, and the export.

    Quotas are not visible to it.

    Args:
        config: the run's configuration.
        architecture: its model.
        run_folder: an existing folder.
        used_bytes: size of its present checkpoints, which new ones replace.

    Raises:
        ConfigError: they do not fit.
    """
    one = checkpoint_bytes(config, architecture)
    keep, best = config.checkpoint.keep, config.checkpoint.keep_best
    every = config.checkpoint.every_steps
    num_saves = 1 if every == 0 else -(-config.num_steps // every)
    most = min(num_saves, keep + best + 1)
    parameters = architecture.num_parameters
    export = parameters * ELEMENT_BYTES[config.model.dtype] if config.checkpoint.export_hf else 0
    needed = most * one + export
    free = shutil.disk_usage(run_folder).free + used_bytes
    logger.info("a checkpoint takes %.2f GiB; %d at once, %.2f GiB free", one / _GIB, most, free / _GIB)
    if needed > free:
        raise ConfigError(
            f"run folder {run_folder} has {free / _GIB:.2f} GiB for checkpoints, the run needs {needed / _GIB:.2f}: "
            f"{most} checkpoints of {one / _GIB:.2f} GiB at once (checkpoint.keep={keep}, checkpoint.keep_best={best}, "
            f"one being written) and {export / _GIB:.2f} GiB for the export; keep fewer, or choose another disk"
        )
