"""Writes a Megatron checkpoint chunk by chunk, through torch's distributed checkpoint and without Megatron.

Megatron's format is torch's (``.metadata`` and ``*.distcp``) with two files beside it: ``metadata.json`` names the
format, ``common.pt`` holds what no rank shards.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from gtpo_megatron.weights.megatron.layout import CheckpointChunk

_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""As Megatron names its own format in ``metadata.json``."""


class _LazySave(SavePlanner):
    """Gives each chunk to the writer when it is to be written."""

    def __init__(self, dtypes: dict[str, torch.dtype], read: Callable[[CheckpointChunk], Tensor]) -> None:
        self._dtypes = dtypes
        self._read = read
        self._chunks: dict[MetadataIndex, CheckpointChunk] = {}

    def plan(self, chunks: Iterable[CheckpointChunk]) -> SavePlan:
        """One file's chunks, in order."""
        items = []
        for chunk in chunks:
            offsets = torch.Size(chunk.part.offsets(chunk.box))
            index = MetadataIndex(chunk.part.key, offsets)
            self._chunks[index] = chunk
            data = TensorWriteData(
                chunk=ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(chunk.part.sizes(chunk.box))),
                properties=TensorProperties(dtype=self._dtypes[chunk.part.key]),
                size=torch.Size(chunk.part.shape),
            )
            items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items=items)

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Reads the tensor of a chunk; it is not kept."""
        chunk = self._chunks[write_item.index]
        return self._read(chunk).reshape(chunk.part.sizes(chunk.box))

    def set_up_planner(self, *_: Any, **__: Any) -> None:
        """Does nothing: there is no state dict."""

    def create_local_plan(self) -> SavePlan:
        """Not used: ``plan`` makes the plans."""
        raise NotImplementedError

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Makes the plan of torch's default planner."""
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Returns the plan unchanged."""
        return new_plan


def write_checkpoint(
    folder: Path,
    ranks: Sequence[Sequence[CheckpointChunk]],
    dtypes: dict[str, torch.dtype],
    read: Callable[[CheckpointChunk], Tensor],
) -> None:
    """Writes a checkpoint of the model's parameters, one file per rank.

    Args:
        folder: is made; must be empty if it is there.
        ranks: the chunks of each file.
        dtypes: dtype of each key.
        read: makes the tensor of a chunk, as a matrix, when it is to be written.

    Raises:
        OSError: the disk is full or not writable; what is there is then unusable.
    """
    planner = _LazySave(dtypes, read)
    # copy-ahead would sort the chunks by size, and so jump between the source's files
    writer = FileSystemWriter(folder, per_thread_copy_ahead=0)
    writer.set_up_storage_writer(is_coordinator=True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.plan(chunks)) for chunks in ranks])
    results = [writer.write_data(plan, planner).wait() for plan in writer.prepare_global_plan(plans)]
    writer.finish(metadata, results)
    torch.save({}, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps(_FORMAT), encoding="utf-8")
