"""What a Megatron checkpoint holds of a model: keys, shapes, and which box is which box of a Hugging Face tensor. Pure.

A checkpoint is one set of whole tensors, cut into chunks that lie in files. Every layer's parameter of one kind is a
slice along the first axis of one tensor: ``decoder.layers.mlp.linear_fc2.weight`` is ``[layers, rows, columns]``. The
layout of the ranks that wrote it shows in the cuts only, so any layout reads what any other wrote.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.errors import WeightMappingError
from gtpo_megatron.weights.architecture import Architecture
from gtpo_megatron.weights.param_mapping import Box, ParamMapping, Replicated, SliceCopy, TensorParallel, clip
from gtpo_megatron.weights.reshard import ShardPlace, fused_name, stage_mappings

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")

_WHOLE = TensorParallel(1, 0)

CHUNK_BYTES = 16 << 20
"""Largest chunk that is written: bounds the memory of reader and writer, and is long for a disk."""

MODEL_KEYS = ("embedding.", "decoder.", "output_layer.")
"""How the keys of a model's parameters begin; a training checkpoint holds the optimizer's beside them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointPart:
    """One parameter of the whole model.

    Attributes:
        key: of the checkpoint's tensor.
        layer: index along its first axis; None if the tensor has no axis for layers.
        mapping: its row of the name table, for the whole model.
    """

    key: str
    layer: int | None
    mapping: ParamMapping

    @property
    def is_vector(self) -> bool:
        """Norms and biases."""
        return self.mapping.extent[1] == 1

    def shape(self, num_layers: int) -> tuple[int, ...]:
        """Of the checkpoint's tensor."""
        rows, columns = self.mapping.extent
        return self._with_layer(num_layers, (rows,) if self.is_vector else (rows, columns))

    def offsets(self, box: Box) -> tuple[int, ...]:
        """Of a box of the parameter in the checkpoint's tensor."""
        return self._with_layer(self.layer, (box.row,) if self.is_vector else (box.row, box.column))

    def sizes(self, box: Box) -> tuple[int, ...]:
        """Of a box of the parameter in the checkpoint's tensor."""
        return self._with_layer(1, (box.num_rows,) if self.is_vector else (box.num_rows, box.num_columns))

    def _with_layer(self, first: int | None, rest: tuple[int, ...]) -> tuple[int, ...]:
        return rest if self.layer is None or first is None else (first, *rest)

    def copies(self, box: Box) -> list[SliceCopy]:
        """What of a box of the parameter is what of Hugging Face tensors; rows that only pad are in none."""
        clipped = (clip(copy, box) for copy in self.mapping.copies(_WHOLE))
        return [copy for copy in clipped if copy is not None]


@dataclass(frozen=True, slots=True)
class CheckpointChunk:
    """A box of a parameter that lies in one piece in a file."""

    part: CheckpointPart
    box: Box


def model_parts(arch: Architecture, padded_vocab_size: int) -> list[CheckpointPart]:
    """Every parameter of a model, in its order. A tied output layer is the embedding and not stored again."""
    mappings = stage_mappings(arch, ShardPlace(tensor_parallel=_WHOLE), padded_vocab_size)
    return [_part(mapping) for mapping in mappings]


def _part(mapping: ParamMapping) -> CheckpointPart:
    name = fused_name(mapping.megatron_name)
    match = _LAYER.fullmatch(name)
    if match is None:
        return CheckpointPart(key=name, layer=None, mapping=mapping)
    return CheckpointPart(key=f"decoder.layers.{match[2]}", layer=int(match[1]), mapping=mapping)


def chunks_by_rank(
    arch: Architecture, parts: list[CheckpointPart], parallel: ParallelConfig
) -> list[list[tuple[CheckpointPart, Box]]]:
    """What each rank of a layout holds, ranks in Megatron's order: the tensor-parallel axis runs fastest.

    Replicated parameters are given to the first rank of their stage. Chunks of a virtual pipeline are not told apart:
    stages are of consecutive layers.
    """
    ranks: list[list[tuple[CheckpointPart, Box]]] = []
    tensor_parallel_size, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    layers = arch.num_layers // stages
    for stage in range(stages):
        held = [part for part in parts if _stage(part, layers, stages) == stage]
        for index in range(tensor_parallel_size):
            tp = TensorParallel(tensor_parallel_size, index)
            ranks.append([(part, box) for part in held if _writes(part, tp) for box in part.mapping.held(tp)])
    return ranks


def _stage(part: CheckpointPart, layers: int, num_stages: int) -> int:
    if part.layer is not None:
        return part.layer // layers
    return 0 if part.key.startswith("embedding.") else num_stages - 1


def _writes(part: CheckpointPart, tp: TensorParallel) -> bool:
    return tp.index == 0 or not isinstance(part.mapping, Replicated)


def cut(part: CheckpointPart, box: Box, item_bytes: int) -> Iterator[CheckpointChunk]:
    """A box in pieces of whole rows, none larger than ``CHUNK_BYTES`` unless one row is."""
    rows = max(1, CHUNK_BYTES // (box.num_columns * item_bytes))
    for start in range(0, box.num_rows, rows):
        count = min(rows, box.num_rows - start)
        yield CheckpointChunk(part, Box(box.row + start, count, box.column, box.num_columns))


def key_dtypes(parts: list[CheckpointPart], dtypes: Mapping[str, torch.dtype]) -> dict[str, torch.dtype]:
    """Key -> dtype of the checkpoint's tensor, which is that of every Hugging Face tensor in it.

    Raises:
        WeightMappingError: tensors that Megatron holds as one have several dtypes.
    """
    found: dict[str, tuple[str, torch.dtype]] = {}
    for part in parts:
        for hf_name in dict.fromkeys(copy.hf_name for copy in part.mapping.copies(_WHOLE)):
            first, dtype = found.setdefault(part.key, (hf_name, dtypes[hf_name]))
            if dtypes[hf_name] != dtype:
                raise WeightMappingError(
                    f"{hf_name} is {dtypes[hf_name]} but {first} is {dtype}, and Megatron holds both in {part.key}; "
                    f"cast them to one dtype"
                )
    return {key: dtype for key, (_, dtype) in found.items()}
