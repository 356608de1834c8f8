"""Checks all values of a model folder before a run starts."""

import logging
import math
from collections.abc import Iterator

from torch import Tensor

from gtpo_megatron.weights.architecture import Architecture
from gtpo_megatron.weights.finite_tensors import require_finite
from gtpo_megatron.weights.hf.reader import WeightFolder
from gtpo_megatron.weights.megatron.reader import MegatronCheckpoint
from gtpo_megatron.weights.param_mapping import Box
from gtpo_megatron.weights.reshard import hf_shapes

logger = logging.getLogger(__name__)

READ_BYTES = 32 << 30
"""Largest model, in 16 bits, that is read through before a run; ranks look at what they load, whatever its size."""

_PIECE_BYTES = 64 << 20


def check_values(source: WeightFolder | MegatronCheckpoint, arch: Architecture) -> None:
    """Reads all tensors of a model of up to ``READ_BYTES`` and checks that they are finite.

    Args:
        source: the model; its names and shapes must have been checked.
        arch: of the model.

    Raises:
        ConfigError: a tensor holds NaN or infinity; the message names tensor and file.
    """
    shapes = hf_shapes(arch)
    if sum(2 * math.prod(shape) for shape in shapes.values()) > READ_BYTES:
        logger.info("%s is too large to be read through before the run; ranks check what they load", source.folder)
        return
    for name, shape in shapes.items():
        if isinstance(source, WeightFolder):
            where, pieces = source.tensors[name].path, _pieces(source, name, shape)
        else:
            where, pieces = source.folder, iter(source.read([name], shapes, _unheard).values())
        require_finite(pieces, name, where=where)


def _pieces(source: WeightFolder, name: str, shape: tuple[int, ...]) -> Iterator[Tensor]:
    num_rows, columns = shape[0], math.prod(shape[1:])
    step = max(1, _PIECE_BYTES // (4 * columns))
    for row in range(0, num_rows, step):
        yield source.read(name, Box(row, min(step, num_rows - row), 0, columns))


def _unheard(_: int) -> None:
    """Discards progress."""
