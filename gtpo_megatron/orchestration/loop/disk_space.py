"""Whether a run's checkpoints will fit on the disk, asked before any process starts."""

import logging
import math
import shutil
from pathlib import Path

from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.weights.architecture import Architecture
from gtpo_megatron.weights.reshard import hf_shapes

logger = logging.getLogger(__name__)

_WEIGHT_BYTES = {"float32": 4, "bfloat16": 2}
_MOMENT_BYTES = 8
"""Adam's two moments, float32."""
_MASTER_BYTES = 4
"""Float32 masters, which bfloat16 models and sharded optimizers have."""
_GIB = 2**30


def checkpoint_bytes(config: RunConfig, architecture: Architecture) -> int:
    """Size of one checkpoint: weights, masters where there are some, Adam's moments. Indices are small beside them."""
    parameters = sum(math.prod(shape) for shape in hf_shapes(architecture).values())
    has_masters = config.model.dtype != "float32" or config.parallel.distributed_optimizer
    each = _WEIGHT_BYTES[config.model.dtype] + _MOMENT_BYTES + (_MASTER_BYTES if has_masters else 0)
    return parameters * each


def check_disk_space(config: RunConfig, architecture: Architecture, run_folder: Path, *, used_bytes: int) -> None:
    """Compares what a run will keep at the same time with what is free.

    That is the checkpoints that are kept, one on its way (the oldest goes only when the new one is whole), and the
    export. Quotas are not known to the file system and not seen here.

    Args:
        config: of the run.
        architecture: of its model.
        run_folder: exists.
        used_bytes: of its checkpoints so far, in the place of which new ones come.

    Raises:
        ConfigError: it cannot fit; with the numbers.
    """
    one = checkpoint_bytes(config, architecture)
    keep, best = config.checkpoint.keep, config.checkpoint.keep_best
    every = config.checkpoint.every_steps
    num_saves = 1 if every == 0 else -(-config.num_steps // every)
    most = min(num_saves, keep + best + 1)
    parameters = sum(math.prod(shape) for shape in hf_shapes(architecture).values())
    export = parameters * _WEIGHT_BYTES[config.model.dtype] if config.checkpoint.export_hf else 0
    needed = most * one + export
    free = shutil.disk_usage(run_folder).free + used_bytes
    logger.info("a checkpoint takes %.2f GiB; %d at once, %.2f GiB free", one / _GIB, most, free / _GIB)
    if needed > free:
        raise ConfigError(
            f"run folder {run_folder} has {free / _GIB:.2f} GiB for checkpoints, the run needs {needed / _GIB:.2f}: "
            f"{most} checkpoints of {one / _GIB:.2f} GiB at once (checkpoint.keep={keep}, checkpoint.keep_best={best}, "
            f"one being written) and {export / _GIB:.2f} GiB for the export; keep fewer, or choose another disk"
        )
