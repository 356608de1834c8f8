"""All experts of a layer in one tensor, as some folders have them; the name tables have each matrix on its own.

What the tables call ``mlp.experts.7.gate_proj.weight`` and the like, transformers 5 has in memory, and writes with
``save_original_format=False``, as

- ``gate_up_proj [experts, 2 ffn, hidden]``, gate before up, and ``down_proj [experts, hidden, ffn]``;
- gpt-oss, in every folder: ``gate_up_proj [experts, hidden, 2 ffn]``, gate and up in turns, ``down_proj [experts, ffn,
  hidden]``, ``gate_up_proj_bias [experts, 2 ffn]`` and ``down_proj_bias [experts, hidden]``.

The first kind is read only; of gpt-oss nothing else is written.

ERNIE 4.5 has the expert bias of a layer as a matrix of one row.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from gtpo_megatron.errors import WeightMappingError
from gtpo_megatron.weights.experts import MAX_EXPERTS

STACKED = tuple(f".mlp.experts.{name}" for name in ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"))
"""End the names of such tensors."""

ONE_ROW = ".moe_statics.e_score_correction_bias"
"""Ends the names of vectors that a folder has as a matrix of one row."""

_PART = re.compile(r"(.*\.mlp\.experts)\.\d+\.(gate|up|down)_proj\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class Inside:
    """A matrix or bias inside a tensor of all experts.

    Attributes:
        name: name of that tensor.
        expert: number of the matrix.
        number: index among the projections that the tensor has of an expert.
        count: number of these projections.
        is_turned: as in gpt-oss; else these projections are one below the other.
    """

    name: str
    expert: int
    number: int
    count: int
    is_turned: bool


def part_of(expert: Tensor, number: int, count: int) -> Tensor:
    """A projection in gpt-oss's tensor of one expert.

    Args:
        expert: ``[hidden, count * rows]``, or of a bias ``[count * rows]``.
        number: number of the projection.
        count: number of projections in it.

    Returns:
        A view, ``[rows, hidden]`` or ``[rows]``.
    """
    return expert[..., number::count].t()


def parts_inside(
    name: str, shape: tuple[int, ...], *, where: Path, is_turned: bool
) -> dict[str, tuple[tuple[int, ...], Inside]]:
    """Name and shape of every matrix or bias in a tensor of all experts, and where in it.

    Args:
        name: name of the tensor.
        shape: shape of it.
        where: its file, for messages.
        is_turned: as in gpt-oss.

    Raises:
        WeightMappingError: the tensor has another shape.
    """
    layer, _, projection = name.rpartition(".")
    kind = "bias" if projection.endswith("_bias") else "weight"
    projection = projection.removesuffix("_bias")
    parts = ("gate_proj", "up_proj") if projection == "gate_up_proj" else (projection,)
    num_experts, *own = shape or (0,)
    own = own[::-1] if is_turned else own
    is_matrix_of_each = len(own) == (1 if kind == "bias" else 2) and all(own) and own[0] % len(parts) == 0
    if not is_matrix_of_each or not 0 < num_experts <= MAX_EXPERTS:
        raise WeightMappingError(f"{where}: {name} has shape {shape}, which is not that of all experts of a layer")
    return {
        f"{layer}.{expert}.{part}.{kind}": (
            (own[0] // len(parts), *own[1:]),
            Inside(name, expert, number, len(parts), is_turned),
        )
        for expert in range(num_experts)
        for number, part in enumerate(parts)
    }


def row_inside(name: str, shape: tuple[int, ...], *, where: Path) -> tuple[tuple[int, ...], Inside]:
    """Shape of a vector that a folder has as a matrix of one row, and where in it.

    Raises:
        WeightMappingError: the matrix has another shape.
    """
    if len(shape) != 2 or shape[0] != 1:
        raise WeightMappingError(f"{where}: {name} has shape {shape}, expected one row")
    return shape[1:], Inside(name, 0, 0, 1, is_turned=True)


def stacks(names: Iterable[str]) -> dict[str, list[str]]:
    """The tensors of a folder that has experts in one, and which of the tables' each is made of, in order."""
    found: dict[str, list[str]] = {}
    for name in names:
        stored = name
        if (part := _PART.fullmatch(name)) is not None:
            projection = "down_proj" if part[2] == "down" else "gate_up_proj"
            stored = f"{part[1]}.{projection}" + ("_bias" if part[3] == "bias" else "")
        found.setdefault(stored, []).append(name)
    return found


def stacked(name: str, parts: Sequence[Tensor]) -> Tensor:
    """A tensor of a folder, of the tables' tensors that ``stacks`` has for it."""
    if name.endswith(ONE_ROW):
        return parts[0][None]
    if not name.endswith(STACKED):
        return parts[0]
    count = 2 if "gate_up_proj" in name else 1
    rows, *columns = parts[0].shape
    whole = parts[0].new_empty(len(parts) // count, *columns, count * rows)
    for index, part in enumerate(parts):
        part_of(whole[index // count], index % count, count).copy_(part)
    return whole
