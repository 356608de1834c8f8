"""Typed mappings: which box of a Megatron shard is which box of a Hugging Face tensor.

A mapping owns the tensor-parallel algebra of one Megatron parameter and yields ``SliceCopy`` rows. Loading reads them
from right to left, export and the weight push from left to right, so the directions cannot drift apart. ``extent`` and
``held`` say the same of the whole parameter, as it lies in Megatron's checkpoints: its size, and a rank's boxes of it.

``kept`` says the other side of a push: which boxes of each Hugging Face tensor a vLLM worker holds.

Every tensor is seen as a matrix ``[rows, columns]``; a vector is one column.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from gtpo_megatron.errors import WeightMappingError


def as_matrix(tensor: Tensor) -> Tensor:
    """Views a tensor as ``[rows, columns]``: a vector is one column, a convolution ``[channels, 1, k]`` loses its 1."""
    return tensor if tensor.ndim == 2 else tensor.reshape(len(tensor), -1)


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle of a matrix: rows ``[row, row + num_rows)``, columns ``[column, column + num_columns)``."""

    row: int
    num_rows: int
    column: int
    num_columns: int

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of rows and columns."""
        return self.num_rows, self.num_columns

    @property
    def slices(self) -> tuple[slice, slice]:
        """Row and column slices that select the box in a matrix."""
        return slice(self.row, self.row + self.num_rows), slice(self.column, self.column + self.num_columns)

    @property
    def num_elements(self) -> int:
        """Number of elements in the box."""
        return self.num_rows * self.num_columns

    def overlap(self, other: "Box") -> "Box | None":
        """Intersection with another box; None if it is empty."""
        row, column = max(self.row, other.row), max(self.column, other.column)
        num_rows = min(self.row + self.num_rows, other.row + other.num_rows) - row
        num_columns = min(self.column + self.num_columns, other.column + other.num_columns) - column
        return Box(row, num_rows, column, num_columns) if num_rows > 0 and num_columns > 0 else None

    def moved(self, rows: int, columns: int) -> "Box":
        """The box shifted by rows and columns."""
        return Box(self.row + rows, self.num_rows, self.column + columns, self.num_columns)


@dataclass(frozen=True, slots=True)
class SliceCopy:
    """One box of this rank's Megatron parameter equals one box of a Hugging Face tensor of the same size."""

    megatron_name: str
    megatron_box: Box
    hf_name: str
    hf_box: Box


def clip(copy: SliceCopy, box: Box) -> SliceCopy | None:
    """The part of a copy whose Megatron side lies in ``box``, relative to the box's corner; None if it is empty."""
    mine, theirs = copy.megatron_box, copy.hf_box
    if (shared := mine.overlap(box)) is None:
        return None
    here, there = shared.moved(-box.row, -box.column), shared.moved(theirs.row - mine.row, theirs.column - mine.column)
    return SliceCopy(copy.megatron_name, here, copy.hf_name, there)


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """A rank's index among the ranks that share a layer's matrices; those of experts have one of their own."""

    size: int
    index: int


@dataclass(frozen=True, slots=True)
class ExpertParallel:
    """A rank's index among the ranks that share a layer's experts, each of them as many neighbouring ones."""

    size: int
    index: int

    def held(self, num_experts: int) -> range:
        """The numbers of this rank's experts.

        Raises:
            WeightMappingError: the experts do not split over the ranks.
        """
        if num_experts % self.size:
            raise WeightMappingError(f"{num_experts} experts do not split over expert_parallel_size={self.size}")
        part = num_experts // self.size
        return range(self.index * part, (self.index + 1) * part)


SAMPLER_VOCAB_MULTIPLE = 64
"""vLLM pads its vocabulary to a multiple of this before it splits it over its workers."""


def _share(total: int, tp: TensorParallel, what: str) -> tuple[int, int]:
    """First element and number of elements of this rank's equal share."""
    if total % tp.size:
        raise WeightMappingError(f"{what}: {total} does not split over tensor_parallel_size={tp.size}")
    part = total // tp.size
    return tp.index * part, part


def _placed(*parts: tuple[str, int]) -> list[tuple[str, int]]:
    """Tensor and first row in it of each part, given its tensor and its rows; parts of one tensor are stacked."""
    ends: dict[str, int] = {}
    placed = []
    for name, rows in parts:
        placed.append((name, ends.get(name, 0)))
        ends[name] = ends.get(name, 0) + rows
    return placed


@dataclass(frozen=True, slots=True)
class Replicated:
    """Norms, routers, projections to latents, biases on what ranks add up: every rank has the whole tensor.

    Attributes:
        expert: number among the layer's experts; None if it is no expert's.
    """

    megatron_name: str
    hf_name: str
    rows: int
    columns: int = 1
    expert: int | None = None

    @property
    def extent(self) -> tuple[int, int]:
        """Rows and columns of the whole Megatron parameter."""
        return self.rows, self.columns

    def held(self, tp: TensorParallel) -> list[Box]:
        """The whole parameter."""
        del tp
        return [Box(0, self.rows, 0, self.columns)]

    def copies(self, tp: TensorParallel) -> Iterator[SliceCopy]:
        """The whole tensor; equal on all ranks, so only rank 0 of ``tp`` need write it."""
        del tp
        box = Box(0, self.rows, 0, self.columns)
        yield SliceCopy(self.megatron_name, box, self.hf_name, box)

    def kept(self, tp: TensorParallel) -> Iterator[tuple[str, Box]]:
        """The whole tensor, on every worker."""
        del tp
        yield self.hf_name, Box(0, self.rows, 0, self.columns)


@dataclass(frozen=True, slots=True)
class ColumnParallel:
    """Heads from a latent, sinks and decays of heads: Megatron splits the output dim, that is rows here.

    Attributes:
        first_row: first row of the parameter in the tensor, of which it may be a part: channels of a convolution.
    """

    megatron_name: str
    hf_name: str
    rows: int
    columns: int
    first_row: int = 0

    @property
    def extent(self) -> tuple[int, int]:
        """Rows and columns of the whole Megatron parameter."""
        return self.rows, self.columns

    def held(self, tp: TensorParallel) -> list[Box]:
        """This rank's rows."""
        start, part = _share(self.rows, tp, self.hf_name)
        return [Box(start, part, 0, self.columns)]

    def copies(self, tp: TensorParallel) -> Iterator[SliceCopy]:
        """This rank's rows."""
        for hf_name, box in self.kept(tp):
            yield SliceCopy(self.megatron_name, Box(0, box.num_rows, 0, self.columns), hf_name, box)

    def kept(self, tp: TensorParallel) -> Iterator[tuple[str, Box]]:
        """A worker's rows; a rank of the trainer has the same."""
        for box in self.held(tp):
            yield self.hf_name, box.moved(self.first_row, 0)


@dataclass(frozen=True, slots=True)
class RowParallel:
    """Output and down projections: Megatron's row-parallel linear splits the input dim, that is columns here.

    Attributes:
        expert: number among the layer's experts; None if it is no expert's.
    """

    megatron_name: str
    hf_name: str
    rows: int
    columns: int
    expert: int | None = None

    @property
    def extent(self) -> tuple[int, int]:
        """Rows and columns of the whole Megatron parameter."""
        return self.rows, self.columns

    def held(self, tp: TensorParallel) -> list[Box]:
        """This rank's columns."""
        start, part = _share(self.columns, tp, self.hf_name)
        return [Box(0, self.rows, start, part)]

    def copies(self, tp: TensorParallel) -> Iterator[SliceCopy]:
        """This rank's columns."""
        start, part = _share(self.columns, tp, self.hf_name)
        yield SliceCopy(self.megatron_name, Box(0, self.rows, 0, part), self.hf_name, Box(0, self.rows, start, part))

    def kept(self, tp: TensorParallel) -> Iterator[tuple[str, Box]]:
        """A worker's columns."""
        start, part = _share(self.columns, tp, self.hf_name)
        yield self.hf_name, Box(0, self.rows, start, part)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Embedding and output layer: split by rows, Megatron's vocabulary padded so that it splits.

    Attributes:
        rows: true vocabulary size; rows at or past it exist in Megatron only and stay zero.
        padded_rows: Megatron's vocabulary size over all ranks.
    """

    megatron_name: str
    hf_name: str
    rows: int
    columns: int
    padded_rows: int

    @property
    def extent(self) -> tuple[int, int]:
        """Rows and columns of the whole Megatron parameter."""
        return self.padded_rows, self.columns

    def held(self, tp: TensorParallel) -> list[Box]:
        """This rank's rows, including padding."""
        start, part = _share(self.padded_rows, tp, self.hf_name)
        return [Box(start, part, 0, self.columns)]

    def copies(self, tp: TensorParallel) -> Iterator[SliceCopy]:
        """This rank's rows without padding; no copy if the rank has padding only."""
        start, part = _share(self.padded_rows, tp, self.hf_name)
        count = min(part, self.rows - start)
        if count > 0:
            yield SliceCopy(
                self.megatron_name, Box(0, count, 0, self.columns), self.hf_name, Box(start, count, 0, self.columns)
            )

    def kept(self, tp: TensorParallel) -> Iterator[tuple[str, Box]]:
        """A worker's rows without vLLM's padding; nothing if the worker has padding only."""
        padded = -(-self.rows // SAMPLER_VOCAB_MULTIPLE) * SAMPLER_VOCAB_MULTIPLE
        start, part = _share(padded, tp, self.hf_name)
        count = min(part, self.rows - start)
        if count > 0:
            yield self.hf_name, Box(start, count, 0, self.columns)


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """Gate and up projections fused: a rank holds its rows of the gate, then its rows of the up projection.

    Attributes:
        gate_name: name of the gate's tensor.
        up_name: name of the up projection's; the same if one tensor has both, the gate above.
        rows: rows of either projection.
        expert: number among the layer's experts; None if it is no expert's.
        workers_share_halves: each of a sampler's workers holds rows of the gate and of the up projection; else, of one
            tensor, a part of all rows in their order.
    """

    megatron_name: str
    gate_name: str
    up_name: str
    rows: int
    columns: int
    expert: int | None = None
    workers_share_halves: bool = True

    @property
    def extent(self) -> tuple[int, int]:
        """Rows and columns of the whole Megatron parameter."""
        return 2 * self.rows, self.columns

    def held(self, tp: TensorParallel) -> list[Box]:
        """Rows of the gate, which comes first as a whole, then of the up projection."""
        start, part = _share(self.rows, tp, self.gate_name)
        return [Box(half * self.rows + start, part, 0, self.columns) for half in (0, 1)]

    def copies(self, tp: TensorParallel) -> Iterator[SliceCopy]:
        """Two copies: this rank's rows of the gate projection, then of the up projection."""
        for half, (hf_name, box) in enumerate(self._halves(tp)):
            yield SliceCopy(self.megatron_name, Box(half * box.num_rows, box.num_rows, 0, self.columns), hf_name, box)

    def kept(self, tp: TensorParallel) -> Iterator[tuple[str, Box]]:
        """A worker's rows of either projection, as a rank of the trainer has them, or of both as one."""
        if self.workers_share_halves:
            yield from self._halves(tp)
        else:
            start, part = _share(2 * self.rows, tp, self.gate_name)
            yield self.gate_name, Box(start, part, 0, self.columns)

    def _halves(self, tp: TensorParallel) -> Iterator[tuple[str, Box]]:
        start, part = _share(self.rows, tp, self.gate_name)
        for hf_name, first in _placed((self.gate_name, self.rows), (self.up_name, self.rows)):
            yield hf_name, Box(first + start, part, 0, self.columns)


@dataclass(frozen=True, slots=True)
class QKV:
    """Query, key and value fused by query group: ``[q of group 0, k of group 0, v of group 0, q of group 1, ...]``.

    With an output gate the tensor of queries has, below the query of each head, its gate; Megatron has the gates of a
    group between its queries and its key.

    Attributes:
        query_name: name of the query's tensor.
        key_name: name of the key's.
        value_name: name of the value's; all three are the same if one tensor has them, one below the other.
        num_heads: query heads of the model.
        num_query_groups: key-value heads of the model.
        head_size: rows per head.
        columns: hidden size, or 1 for the bias.
        has_gate: the output has a gate.
    """

    megatron_name: str
    query_name: str
    key_name: str
    value_name: str
    num_heads: int
    num_query_groups: int
    head_size: int
    columns: int
    has_gate: bool = False

    @property
    def extent(self) -> tuple[int, int]:
        """Rows and columns of the whole Megatron parameter."""
        return self.num_heads * self._query_rows + 2 * self.num_query_groups * self.head_size, self.columns

    @property
    def _query_rows(self) -> int:
        """Of a head's query, with its gate."""
        return (1 + self.has_gate) * self.head_size

    def held(self, tp: TensorParallel) -> list[Box]:
        """This rank's query groups, which lie side by side."""
        start, part = _share(self.extent[0], tp, self.query_name)
        return [Box(start, part, 0, self.columns)]

    def copies(self, tp: TensorParallel) -> Iterator[SliceCopy]:
        """Query, key and value of each query group that this rank holds, in boxes as large as they can be."""
        first_group, groups = _share(self.num_query_groups, tp, self.query_name)
        (query_name, first_query), (key_name, first_key), (value_name, first_value) = self._parts
        heads, size = self.num_heads // self.num_query_groups, self.head_size
        row = 0
        for group in range(first_group, first_group + groups):
            first = first_query + group * heads * self._query_rows
            boxes = [(query_name, first, heads * size)]
            if self.has_gate:
                starts = [first + head * 2 * size for head in range(heads)]
                boxes = [(query_name, start + gate, size) for gate in (0, size) for start in starts]
            boxes += [(key_name, first_key + group * size, size), (value_name, first_value + group * size, size)]
            for hf_name, start, rows in boxes:
                yield SliceCopy(
                    self.megatron_name, Box(row, rows, 0, self.columns), hf_name, Box(start, rows, 0, self.columns)
                )
                row += rows

    def kept(self, tp: TensorParallel) -> Iterator[tuple[str, Box]]:
        """A worker's heads; with more workers than key-value heads several workers hold the same one."""
        first_head, heads = _share(self.num_heads, tp, self.query_name)
        yield self.query_name, Box(first_head * self._query_rows, heads * self._query_rows, 0, self.columns)
        if tp.size > self.num_query_groups:
            if tp.size % self.num_query_groups:
                raise WeightMappingError(
                    f"{self.key_name}: {self.num_query_groups} key-value heads cannot be repeated evenly over "
                    f"tensor_parallel_size={tp.size}"
                )
            first_group, groups = tp.index // (tp.size // self.num_query_groups), 1
        else:
            first_group, groups = _share(self.num_query_groups, tp, self.key_name)
        for hf_name, first in self._parts[1:]:
            yield hf_name, Box(first + first_group * self.head_size, groups * self.head_size, 0, self.columns)

    @property
    def _parts(self) -> list[tuple[str, int]]:
        """Tensor and first row in it of query, key and value."""
        rows = self.num_query_groups * self.head_size
        return _placed(
            (self.query_name, self.num_heads * self._query_rows), (self.key_name, rows), (self.value_name, rows)
        )


@dataclass(frozen=True, slots=True)
class HeadParts:
    """Megatron has all parts of a head side by side, head after head; a folder has each part of all heads by itself.

    Attributes:
        parts: of each part its tensor, its first row there, and its rows in a head.
        num_heads: heads of the model.
        columns: hidden size.
        is_split: tensor-parallel ranks share the heads; else every rank has all.
    """

    megatron_name: str
    parts: tuple[tuple[str, int, int], ...]
    num_heads: int
    columns: int
    is_split: bool = True

    @property
    def extent(self) -> tuple[int, int]:
        """Rows and columns of the whole Megatron parameter."""
        return self.num_heads * sum(rows for _, _, rows in self.parts), self.columns

    def held(self, tp: TensorParallel) -> list[Box]:
        """This rank's heads, or all."""
        first, heads = self._heads(tp)
        by_head = self.extent[0] // self.num_heads
        return [Box(first * by_head, heads * by_head, 0, self.columns)]

    def copies(self, tp: TensorParallel) -> Iterator[SliceCopy]:
        """Each part of each head that this rank holds."""
        first, heads = self._heads(tp)
        row = 0
        for head in range(first, first + heads):
            for hf_name, start, rows in self.parts:
                there = Box(start + head * rows, rows, 0, self.columns)
                yield SliceCopy(self.megatron_name, Box(row, rows, 0, self.columns), hf_name, there)
                row += rows

    def kept(self, tp: TensorParallel) -> Iterator[tuple[str, Box]]:
        """Each part of a worker's heads; a rank of the trainer has the same."""
        first, heads = self._heads(tp)
        for hf_name, start, rows in self.parts:
            yield hf_name, Box(start + first * rows, heads * rows, 0, self.columns)

    def _heads(self, tp: TensorParallel) -> tuple[int, int]:
        return _share(self.num_heads, tp, self.parts[0][0]) if self.is_split else (0, self.num_heads)


ParamMapping = Replicated | ColumnParallel | RowParallel | Vocabulary | GatedMLP | QKV | HeadParts


def is_replicated(mapping: ParamMapping) -> bool:
    """Whether every tensor-parallel rank has the whole parameter."""
    return isinstance(mapping, Replicated) or (isinstance(mapping, HeadParts) and not mapping.is_split)


def expert_of(mapping: ParamMapping) -> int | None:
    """The number of the expert that a parameter belongs to; None if it belongs to none.

    Parameters of experts are split by expert parallelism and the experts' tensor parallelism, all others by tensor
    parallelism.
    """
    return mapping.expert if isinstance(mapping, GatedMLP | RowParallel | Replicated) else None
