"""Reads the model's parameters out of a Megatron checkpoint, chunk by chunk and without Megatron."""

import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from gtpo_megatron.errors import CheckpointError, WeightMappingError
from gtpo_megatron.weights.architecture import Architecture
from gtpo_megatron.weights.hf.reader import check_names
from gtpo_megatron.weights.megatron.layout import MODEL_KEYS, CheckpointChunk, model_parts
from gtpo_megatron.weights.megatron.restricted_pickle import RestrictedReader, refusal
from gtpo_megatron.weights.param_mapping import Box, SliceCopy, as_matrix

LAYERS = "decoder.layers."

_KEY_OF_ONE_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
"""Megatron also writes layers one by one, if it was told to."""


ALIGNMENT_BYTES = 64
"""Start of every tensor in memory, one cache line."""


def is_checkpoint(folder: Path) -> bool:
    """A folder in Megatron's format; it may still be damaged."""
    return (folder / "metadata.json").is_file() and (folder / ".metadata").is_file()


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
        self._reader = RestrictedReader(folder)
        metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
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
        """Every stored chunk's place in the model; proves that all parameters are there, whole, and no others."""
        embedding = tensors.get("embedding.word_embeddings.weight")
        padded = max(self._arch.vocab_size, embedding.size[0] if embedding is not None else 0)
        parts = {(part.key, part.layer): part for part in model_parts(self._arch, padded)}
        check_names({_locate(key)[0] for key in tensors}, {key for key, _ in parts}, where=str(self.folder))
        chunks: dict[MetadataIndex, CheckpointChunk] = {}
        areas = dict.fromkeys(parts, 0)
        for key, entry in tensors.items():
            name, layer = _locate(key)
            is_stacked = layer is None and name.startswith(LAYERS)
            part = parts.get((name, 0 if is_stacked else layer))
            shape = None if part is None else part.shape(self._arch.num_layers)[int(layer is not None) :]
            if part is None or tuple(entry.size) != shape:
                raise WeightMappingError(f"{self.folder}: {key} has shape {tuple(entry.size)}, expected {shape}")
            for stored in entry.chunks:
                place = (name, stored.offsets[0] if is_stacked else layer)
                box = _box(stored, num_leading=int(is_stacked))
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

    def read(
        self, names: Iterable[str], shapes: Mapping[str, tuple[int, ...]], advance: Callable[[int], None]
    ) -> dict[str, Tensor]:
        """Some of the Hugging Face tensors, whole, in memory that the next call overwrites.

        Args:
            names: of the tensors.
            shapes: of every tensor of the model.
            advance: is told the bytes of each piece that was filled in.

        Raises:
            CheckpointError: a file cannot be read.
        """
        tensors = self._make_room({name: shapes[name] for name in names})
        indices = dict.fromkeys(index for name in tensors for index in self._by_hf_name[name])
        items = [_read_item(index, self._stored[index]) for index in indices]
        try:
            self._reader.read_data(LoadPlan(items), _Scatter(self._chunks, tensors, advance)).wait()
        except (OSError, RuntimeError, EOFError, ValueError) as error:
            raise CheckpointError(f"{self.folder} {refusal(error)}") from error
        return tensors

    def _make_room(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """Tensors side by side in one piece of memory, which is kept: fresh memory costs as much as a copy."""
        sizes = {name: torch.Size(shape).numel() * self.dtypes[name].itemsize for name, shape in shapes.items()}
        starts = [0, *itertools.accumulate(-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in sizes.values())]
        if self._room.numel() < starts[-1]:
            self._room = torch.empty(starts[-1], dtype=torch.uint8)
        return {
            name: self._room[start : start + size].view(self.dtypes[name]).view(shapes[name])
            for start, (name, size) in zip(starts, sizes.items(), strict=False)
        }


class _Scatter(LoadPlanner):
    """Takes each chunk as it is read and copies its boxes into the tensors that want them."""

    def __init__(
        self,
        chunks: Mapping[MetadataIndex, CheckpointChunk],
        tensors: dict[str, Tensor],
        advance: Callable[[int], None],
    ) -> None:
        self._chunks = chunks
        self._tensors = tensors
        self._advance = advance
        self._room = torch.empty(0, dtype=torch.uint8)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Where one tensor wants the whole chunk, its place there; else room that the next chunk overwrites."""
        chunk, wanted = self._wanted(read_item)
        if wanted[0].megatron_box.shape == chunk.box.shape:
            return self._place(wanted[0]).view(read_item.lengths)
        dtype = self._tensors[wanted[0].hf_name].dtype
        num_bytes = read_item.lengths.numel() * dtype.itemsize
        if self._room.numel() < num_bytes:
            self._room = torch.empty(num_bytes, dtype=torch.uint8)
        return self._room[:num_bytes].view(dtype).view(read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Copies what is wanted of the chunk, unless it was read into its place."""
        chunk, wanted = self._wanted(read_item)
        matrix = tensor.reshape(chunk.box.shape)
        for copy in wanted:
            if copy.megatron_box.shape != chunk.box.shape:
                self._place(copy).copy_(matrix[copy.megatron_box.slices])
            self._advance(self._place(copy).nbytes)

    def _wanted(self, read_item: ReadItem) -> tuple[CheckpointChunk, list[SliceCopy]]:
        chunk = self._chunks[read_item.storage_index]
        return chunk, [copy for copy in chunk.part.copies(chunk.box) if copy.hf_name in self._tensors]

    def _place(self, copy: SliceCopy) -> Tensor:
        return as_matrix(self._tensors[copy.hf_name])[copy.hf_box.slices]

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Plans have tensors only."""
        raise NotImplementedError

    def set_up_planner(self, *_: Any, **__: Any) -> None:
        """Nothing: there is no state dict."""

    def create_local_plan(self) -> LoadPlan:
        """Plans are made by ``MegatronCheckpoint.read``."""
        raise NotImplementedError

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Unchanged."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Unchanged."""
        return central_plan


def _locate(key: str) -> tuple[str, int | None]:
    """A key's name with all layers alike, and the one layer it is of; None if it holds all layers or none."""
    match = _KEY_OF_ONE_LAYER.fullmatch(key)
    return (key, None) if match is None else (LAYERS + match[2], int(match[1]))


def _box(stored: ChunkStorageMetadata, *, num_leading: int) -> Box:
    """A stored chunk as a box of its parameter; leading axes are those of layers."""
    (row, *columns), (num_rows, *num_columns) = stored.offsets[num_leading:], stored.sizes[num_leading:]
    return Box(row, num_rows, *(columns or [0]), *(num_columns or [1]))


def _read_item(index: MetadataIndex, stored: ChunkStorageMetadata) -> ReadItem:
    """The whole of a stored chunk."""
    nowhere = torch.Size([0] * len(stored.sizes))
    return ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=index,
        dest_offsets=nowhere,
        storage_index=index,
        storage_offsets=nowhere,
        lengths=stored.sizes,
    )
