"""Reads a checkpoint's tensors and objects without a world of ranks and without a model. Free of Megatron."""

from collections.abc import Sequence
from operator import add
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from gtpo_megatron.errors import CheckpointError
from gtpo_megatron.untrusted.text import printable
from gtpo_megatron.weights.megatron.checkpoint_files import Verify, check_checkpoint
from gtpo_megatron.weights.megatron.restricted_pickle import (
    OBJECT_MARK,
    load_index,
    load_object,
    load_stored,
    load_torch,
)

COMMON_FILE = "common.pt"
_COMMON_OBJECT = f"common_state{OBJECT_MARK}0_1"
"""Where Megatron 0.19 keeps what was in ``common.pt``."""


def load_common(folder: Path, index: Metadata) -> Any:
    """Reads what all ranks share, from ``common.pt`` or, as Megatron 0.19 writes it, from an object of a rank.

    Raises:
        CheckpointError: it cannot be read, or names what may not be in it.
    """
    path = folder / COMMON_FILE
    return load_torch(path) if path.exists() else load_object(folder, index, _COMMON_OBJECT)[0]


def load_whole(folder: Path, index: Metadata, name: str) -> Tensor:
    """A whole tensor on the CPU, whatever layout wrote it.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    entry: Any = index.state_dict_metadata[name]
    if sum(chunk.sizes.numel() for chunk in entry.chunks) != entry.size.numel():
        raise CheckpointError(f"checkpoint {folder} is damaged: of {printable(name)} it has other parts than the whole")
    whole = torch.empty(entry.size, dtype=entry.properties.dtype)
    for chunk in entry.chunks:
        found = load_stored(folder, index, MetadataIndex(name, chunk.offsets))
        target = whole[tuple(map(slice, chunk.offsets, map(add, chunk.offsets, chunk.sizes)))]
        if not isinstance(found, Tensor) or not found.shape == target.shape == chunk.sizes:
            raise CheckpointError(f"checkpoint {folder} is damaged: {name} is not of the size that it says")
        target.copy_(found)
    return whole


class CheckpointReader:
    """The ranks' part of one checkpoint, whole tensors whatever layout wrote it.

    Args:
        folder: folder of the checkpoint.
        verify: what is compared with its manifest before anything is read.

    Attributes:
        tensors: name -> shape and dtype; names are those that ``actor/checkpoint/rank_checkpoint.py`` lists.
        objects: names of everything else, with its place in the layout.

    Raises:
        CheckpointError: no checkpoint, a damaged one, or its index cannot be read.
    """

    def __init__(self, folder: Path, *, verify: Verify = "full") -> None:
        check_checkpoint(folder, verify)
        self._folder = folder
        self._metadata = load_index(folder)
        entries = self._metadata.state_dict_metadata
        self.tensors = {
            name: (tuple(entry.size), entry.properties.dtype)
            for name, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self.objects = [name for name, entry in entries.items() if isinstance(entry, BytesStorageMetadata)]

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Whole tensors on the CPU.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        return {name: load_whole(self._folder, self._metadata, name) for name in names}

    def read_object(self, name: str) -> Any:
        """An object that a rank stored, such as its random states.

        Raises:
            CheckpointError: it is not there once, cannot be read, or names what no checkpoint holds.
        """
        return load_object(self._folder, self._metadata, name)

    def read_common(self) -> Any:
        """Reads what all ranks share: optimizer groups, schedule, counters.

        Raises:
            CheckpointError: as in :meth:`read_object`.
        """
        return load_common(self._folder, self._metadata)
