"""Contents of a Megatron checkpoint: keys, shapes, and which box is which box of a Hugging Face tensor. Pure.

A checkpoint is one set of whole tensors, cut into chunks that lie in files. Every layer's parameter of one kind is a
slice along the first axis of one tensor: ``decoder.layers.mlp.linear_fc2.weight`` is ``[layers, rows, columns]``.
Experts add an axis: ``decoder.layers.mlp.experts.experts.linear_fc2.weight`` is ``[layers, experts, rows, columns]``.
If only some layers have experts, Megatron writes every layer under keys of its own, ``decoder.layers.3.mlp...``,
without the axis of layers. The layout of the ranks that wrote it shows in the cuts only, so any layout reads what any
other wrote.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from gtpo_megatron.config.parallel import LayerSplit, ParallelConfig
from gtpo_megatron.errors import WeightMappingError
from gtpo_megatron.weights.architecture import Architecture
from gtpo_megatron.weights.param_mapping import (
    Box,
    ParamMapping,
    SliceCopy,
    TensorParallel,
    clip,
    expert_of,
    is_replicated,
)
from gtpo_megatron.weights.reshard import ShardCoordinates, fused_name, shard_coordinates, stage_mappings

LAYERS = "decoder.layers."

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_LOCAL_EXPERT = re.compile(r"mlp\.experts\.local_experts\.\d+\.")
_EXPERTS = "mlp.experts.experts."
"""Stands in the keys of experts' parameters, whose number is an index along an axis."""

_WHOLE = TensorParallel(1, 0)

CHUNK_BYTES = 16 << 20
"""Largest chunk that is written: bounds the memory of reader and writer, and is long for a disk."""

MODEL_KEYS = ("embedding.", "decoder.", "output_layer.")
"""How the keys of a model's parameters begin; a training checkpoint holds the optimizer's beside them."""


class PartPlace(NamedTuple):
    """Which parameter of the model.

    Attributes:
        name: key of a checkpoint's tensor that holds it for all layers.
        layer: None if it is no layer's.
        expert: None if it is no expert's.
    """

    name: str
    layer: int | None
    expert: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointPart:
    """One parameter of the whole model.

    Attributes:
        key: key of the checkpoint's tensor.
        place: the parameter, however the layers are written.
        axes: leading axes of the checkpoint's tensor, those of layers and experts: index and size of each.
        mapping: its row of the name table, for the whole model.
    """

    key: str
    place: PartPlace
    axes: tuple[tuple[int, int], ...]
    mapping: ParamMapping

    @property
    def is_vector(self) -> bool:
        """Whether the parameter is a norm or a bias."""
        return self.mapping.extent[1] == 1

    @property
    def own_shape(self) -> tuple[int, ...]:
        """Shape of the parameter, without the leading axes."""
        return self.mapping.extent[:1] if self.is_vector else self.mapping.extent

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the checkpoint's tensor."""
        return (*(size for _, size in self.axes), *self.own_shape)

    def offsets(self, box: Box) -> tuple[int, ...]:
        """Offsets of a box of the parameter in the checkpoint's tensor."""
        return (*(index for index, _ in self.axes), *((box.row,) if self.is_vector else (box.row, box.column)))

    def sizes(self, box: Box) -> tuple[int, ...]:
        """Sizes of a box of the parameter in the checkpoint's tensor."""
        return (*(1 for _ in self.axes), *((box.num_rows,) if self.is_vector else box.shape))

    def copies(self, box: Box) -> list[SliceCopy]:
        """Copies between a box of the parameter and Hugging Face tensors; padding rows have none."""
        clipped = (clip(copy, box) for copy in self.mapping.copies(_WHOLE))
        return [copy for copy in clipped if copy is not None]


@dataclass(frozen=True, slots=True)
class CheckpointChunk:
    """A box of a parameter that is stored contiguously in a file."""

    part: CheckpointPart
    box: Box


def model_parts(arch: Architecture, padded_vocab_size: int) -> list[CheckpointPart]:
    """Every parameter of a model, in its order. A tied output layer is the embedding and not stored again."""
    mappings = stage_mappings(arch, ShardCoordinates(tensor_parallel=_WHOLE), padded_vocab_size)
    return [_part(arch, mapping) for mapping in mappings]


def _part(arch: Architecture, mapping: ParamMapping) -> CheckpointPart:
    match = _LAYER.fullmatch(mapping.megatron_name)
    if match is None:
        place = PartPlace(mapping.megatron_name, None, None)
        return CheckpointPart(key=place.name, place=place, axes=(), mapping=mapping)
    layer, expert = int(match[1]), expert_of(mapping)
    own_attention = arch.latents is not None or arch.has_delta_net(layer)
    fused = fused_name(mapping.megatron_name, has_experts=arch.has_experts(layer), has_own_attention=own_attention)
    name = _LOCAL_EXPERT.sub(_EXPERTS, fused)
    is_numbered = not arch.has_equal_layers
    place = PartPlace(LAYERS + name.removeprefix(f"{LAYERS}{layer}."), layer, expert)
    axes = [] if is_numbered else [(layer, arch.num_layers)]
    if expert is not None and arch.experts is not None:
        axes.append((expert, arch.experts.num_experts))
    return CheckpointPart(key=name if is_numbered else place.name, place=place, axes=tuple(axes), mapping=mapping)


def locate(key: str) -> tuple[str, int | None]:
    """A key's name with all layers alike, and the one layer it is of; None if it holds all layers or none."""
    match = _LAYER.fullmatch(key)
    return (key, None) if match is None else (LAYERS + match[2], int(match[1]))


def chunks_by_rank(
    arch: Architecture, parts: list[CheckpointPart], parallel: ParallelConfig
) -> list[list[tuple[CheckpointPart, Box]]]:
    """Chunks that each rank of a layout holds; ranks in Megatron's order, without those that hold replicas only.

    Replicated parameters are given to the first rank of their stage. Chunks of a virtual pipeline are not told apart:
    stages are of consecutive layers.
    """
    ranks: list[list[tuple[CheckpointPart, Box]]] = []
    stages = parallel.pipeline_parallel_size
    split = LayerSplit(stages, 1, parallel.last_stage_layers)
    stage_ranks = parallel.num_ranks // stages
    num_dense = parallel.tensor_parallel_size
    num_sparse = parallel.expert_parallel_size * parallel.expert_tensor_parallel_size if arch.experts else 0
    for stage in range(stages):
        layers = split.layers(arch.num_layers, stage)
        held = [part for part in parts if _is_of_stage(part, layers, arch.num_layers)]
        for index in range(max(num_dense, num_sparse)):
            coordinates = shard_coordinates(parallel, stage * stage_ranks + index)
            mine = [part for part in held if index < (num_dense if part.place.expert is None else num_sparse)]
            ranks.append([(part, box) for part in mine for box in _held(arch, part, coordinates)])
    return ranks


def _held(arch: Architecture, part: CheckpointPart, coordinates: ShardCoordinates) -> list[Box]:
    """The boxes of a parameter that a rank writes."""
    if is_replicated(part.mapping) and coordinates.split_of(part.mapping).index > 0:
        return []
    num_experts = arch.experts.num_experts if arch.experts is not None else 0
    if part.place.expert is not None and part.place.expert not in coordinates.expert_parallel.held(num_experts):
        return []
    return part.mapping.held(coordinates.split_of(part.mapping))


def _is_of_stage(part: CheckpointPart, layers: range, num_layers: int) -> bool:
    if part.place.layer is not None:
        return part.place.layer in layers
    return layers.start == 0 if part.key.startswith("embedding.") else layers.stop == num_layers


def cut(part: CheckpointPart, box: Box, item_bytes: int) -> Iterator[CheckpointChunk]:
    """Cuts a box into chunks of whole rows, of at most ``CHUNK_BYTES`` unless one row is larger."""
    rows = max(1, CHUNK_BYTES // (box.num_columns * item_bytes))
    for start in range(0, box.num_rows, rows):
        count = min(rows, box.num_rows - start)
        yield CheckpointChunk(part, Box(box.row + start, count, box.column, box.num_columns))


def key_dtypes(parts: list[CheckpointPart], dtypes: Mapping[str, torch.dtype]) -> dict[str, torch.dtype]:
    """Returns the dtype of every key, which is that of all Hugging Face tensors in it.

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
