"""Reads the model's parameters out of a Megatron checkpoint, chunk by chunk and without Megatron."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from gtpo_megatron.errors import CheckpointError, WeightMappingError
from gtpo_megatron.untrusted.text import printable
from gtpo_megatron.weights.architecture import Architecture
from gtpo_megatron.weights.hf.reader import check_names
from gtpo_megatron.weights.megatron.layout import (
    LAYERS,
    MODEL_KEYS,
    CheckpointChunk,
    CheckpointPart,
    PartPlace,
    locate,
    model_parts,
)
from gtpo_megatron.weights.megatron.restricted_pickle import load_index, load_stored
from gtpo_megatron.weights.param_mapping import Box, as_matrix

ALIGNMENT_BYTES = 64
"""Start of every tensor in memory, one cache line."""


class MegatronCheckpoint:
    """The parameters of a model in a Megatron checkpoint, converted or saved by a training run.

    Args:
        folder: holds ``.metadata``.
        arch: the model it must be of.

    Raises:
        CheckpointError: it cannot be read, or a file is missing or shorter than it must be.
        WeightMappingError: parameters are missing, too many, of another shape or not whole.
    """

    def __init__(self, folder: Path, arch: Architecture) -> None:
        self.folder = folder
        self._arch = arch
        self._room = torch.empty(0, dtype=torch.uint8)
        self._metadata = metadata = load_index(folder)
        self._check_files(metadata)
        tensors = {
            key: entry
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and key.startswith(MODEL_KEYS)
        }
        self._stored = {
            MetadataIndex(key, stored.offsets): stored for key, entry in tensors.items() for stored in entry.chunks
        }
        self._chunks = self._match(tensors)
        self._by_hf_name: dict[str, list[MetadataIndex]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        for index, chunk in self._chunks.items():
            for copy in chunk.part.copies(chunk.box):
                indices = self._by_hf_name.setdefault(copy.hf_name, [])
                if index not in indices[-1:]:
                    indices.append(index)
                self.dtypes[copy.hf_name] = tensors[index.fqn].properties.dtype

    def _check_files(self, metadata: Metadata) -> None:
        ends: dict[str, int] = {}
        for info in (metadata.storage_data or {}).values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        for name, end in sorted(ends.items()):
            path = self.folder / name
            found = path.stat().st_size if path.is_file() else None
            if found is None or found < end:
                state = "is missing" if found is None else f"is cut short at {found} of {end} bytes"
                raise CheckpointError(f"{path} {state}; copy the checkpoint again, or take another")

    def _match(self, tensors: Mapping[str, TensorStorageMetadata]) -> dict[MetadataIndex, CheckpointChunk]:
        """Locates every stored chunk in the model; raises unless all its parameters are stored whole, and no others."""
        embedding = tensors.get("embedding.word_embeddings.weight")
        padded = max(self._arch.vocab_size, embedding.size[0] if embedding is not None else 0)
        parts = {part.place: part for part in model_parts(self._arch, padded)}
        check_names({locate(key)[0] for key in tensors}, {place.name for place in parts}, where=str(self.folder))
        by_name = {place.name: part for place, part in parts.items()}
        chunks: dict[MetadataIndex, CheckpointChunk] = {}
        areas = dict.fromkeys(parts, 0)
        for key, entry in tensors.items():
            name, layer = locate(key)
            axes = self._leading_axes(by_name[name], layer)
            shape = (*axes, *by_name[name].own_shape)
            if tuple(entry.size) != shape:
                raise WeightMappingError(f"{self.folder}: {key} has shape {tuple(entry.size)}, expected {shape}")
            for stored in entry.chunks:
                leading = list(stored.offsets[: len(axes)])
                number = leading.pop(0) if layer is None and name.startswith(LAYERS) else layer
                place = PartPlace(name, number, leading[0] if leading else None)
                if place not in parts:
                    raise WeightMappingError(f"{self.folder}: {key} is of layer {number}, which has no such parameter")
                box = _box(stored, num_leading=len(axes))
                chunks[MetadataIndex(key, stored.offsets)] = CheckpointChunk(parts[place], box)
                areas[place] += box.num_rows * box.num_columns
        for place, part in parts.items():
            rows, columns = part.mapping.extent
            if areas[place] != rows * columns:
                name = part.mapping.megatron_name
                raise WeightMappingError(
                    f"{self.folder}: {areas[place]} of {rows * columns} elements of {name} are stored"
                )
        return chunks

    def _leading_axes(self, part: CheckpointPart, layer: int | None) -> list[int]:
        """Sizes of the axes before the parameter's own: of layers, unless the key is of one layer, and of experts."""
        axes = [self._arch.num_layers] if layer is None and part.place.layer is not None else []
        if part.place.expert is not None and self._arch.experts is not None:
            axes.append(self._arch.experts.num_experts)
        return axes

    def read(
        self, names: Iterable[str], shapes: Mapping[str, tuple[int, ...]], advance: Callable[[int], None]
    ) -> dict[str, Tensor]:
        """Reads Hugging Face tensors completely, into memory that the next call overwrites.

        Args:
            names: names of the tensors.
            shapes: shapes of every tensor of the model.
            advance: called with the bytes of each piece.

        Raises:
            CheckpointError: a file cannot be read.
        """
        tensors = self._make_room({name: shapes[name] for name in names})
        indices = dict.fromkeys(index for name in tensors for index in self._by_hf_name[name])
        # from the start of each file to its end
        for index in sorted(indices, key=self._place_of):
            self._scatter(index, tensors, advance)
        return tensors

    def _place_of(self, index: MetadataIndex) -> tuple[str, int]:
        info = self._metadata.storage_data[index]
        return info.relative_path, info.offset

    def _scatter(self, index: MetadataIndex, tensors: Mapping[str, Tensor], advance: Callable[[int], None]) -> None:
        """Reads a stored chunk and copies its boxes into the tensors that want them."""
        chunk, found = self._chunks[index], load_stored(self.folder, self._metadata, index)
        if not isinstance(found, Tensor) or found.shape != self._stored[index].sizes:
            raise CheckpointError(f"{self.folder} is damaged: {printable(index.fqn)} is not of the size that it says")
        matrix = found.reshape(chunk.box.shape)
        for copy in chunk.part.copies(chunk.box):
            if copy.hf_name in tensors:
                target = as_matrix(tensors[copy.hf_name])[copy.hf_box.slices]
                target.copy_(matrix[copy.megatron_box.slices])
                advance(target.nbytes)

    def _make_room(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """Allocates the tensors in one buffer, which is reused: new memory costs as much as a copy."""
        sizes = {name: torch.Size(shape).numel() * self.dtypes[name].itemsize for name, shape in shapes.items()}
        starts = [0, *itertools.accumulate(-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in sizes.values())]
        if self._room.numel() < starts[-1]:
            self._room = torch.empty(starts[-1], dtype=torch.uint8)
        return {
            name: self._room[start : start + size].view(self.dtypes[name]).view(shapes[name])
            for start, (name, size) in zip(starts, sizes.items(), strict=False)
        }


def _box(stored: ChunkStorageMetadata, *, num_leading: int) -> Box:
    """A stored chunk as a box of its parameter; leading axes are those of layers and experts."""
    (row, *columns), (num_rows, *num_columns) = stored.offsets[num_leading:], stored.sizes[num_leading:]
    return Box(row, num_rows, *(columns or [0]), *(num_columns or [1]))
