"""Checks model folders before a run: names, shapes and values of weights, the architecture of other models."""

import dataclasses
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.untrusted.text import printable
from gtpo_megatron.weights.architecture import Architecture
from gtpo_megatron.weights.config_json import read_architecture
from gtpo_megatron.weights.hf.reader import WeightFolder, check_one_model, require_finite
from gtpo_megatron.weights.megatron.checkpoint_files import converted_weights
from gtpo_megatron.weights.param_mapping import Box
from gtpo_megatron.weights.reshard import hf_shapes

if TYPE_CHECKING:
    from gtpo_megatron.weights.megatron.reader import MegatronCheckpoint

logger = logging.getLogger(__name__)

READ_BYTES = 32 << 30
"""Largest model, in 16 bits, that is read through before a run; ranks look at what they load, whatever its size."""

_PIECE_BYTES = 64 << 20


def check_weights(folder: Path, arch: Architecture) -> None:
    """Checks names, shapes, sizes and values of a model folder of either kind; raises what loading it would raise."""
    converted = converted_weights(folder)
    if converted is not None:
        check_one_model(folder)  # adapters that were lost on the way
        from gtpo_megatron.weights.megatron.reader import MegatronCheckpoint

        check_values(MegatronCheckpoint(converted, arch), arch)
        return
    with WeightFolder(folder) as weights:
        weights.check(hf_shapes(arch))
        check_values(weights, arch)


def check_values(source: "WeightFolder | MegatronCheckpoint", arch: Architecture) -> None:
    """Reads all tensors of a model of up to ``READ_BYTES`` and checks that they are finite.

    Args:
        source: the model; its names and shapes must have been checked.
        arch: architecture of the model.

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


def check_same_architecture(folder: Path, arch: Architecture) -> None:
    """Raises ConfigError unless a reference policy's folder has the policy's architecture, whatever its context."""
    if not (folder / "config.json").is_file():
        raise ConfigError(f"reference.path={printable(folder)} has no config.json; give a model folder")
    found = dataclasses.replace(read_architecture(folder), max_positions=arch.max_positions)
    for name in ("family", *(part.name for part in dataclasses.fields(arch) if part.compare)):
        ours, theirs = getattr(arch, name), getattr(found, name)
        if ours != theirs:
            raise ConfigError(
                f"reference.path={printable(folder)}: {name} is {theirs}, that of model.path is {ours}; give the "
                f"folder of a model of the same shape"
            )


def teacher_architecture(folder: Path, parallel: ParallelConfig, *, num_tokens: int) -> Architecture:
    """The architecture of a teacher, which may be any that the run's layout divides.

    Args:
        folder: its model folder.
        parallel: the layout.
        num_tokens: tokens of the longest prompt with the longest response.

    Raises:
        ConfigError: it cannot be read, the layout does not divide it, or sequences are longer than its positions.
    """
    where = f"teacher.path={printable(folder)}"
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{where} has no config.json; give a model folder")
    arch = read_architecture(folder)
    try:
        arch.check_layout(parallel)
    except ConfigError as error:
        raise ConfigError(f"{where}, which is scored in the layout of the policy: {error}") from error
    if num_tokens > arch.max_positions:
        raise ConfigError(
            f"{where}: model.max_sequence_tokens = {num_tokens} exceeds its {arch.positions_said}; lower it, or take "
            f"another teacher"
        )
    return arch.for_sequences(num_tokens)
