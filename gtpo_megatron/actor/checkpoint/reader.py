"""Reads a checkpoint's tensors and objects without a world of ranks and without a model. Free of Megatron."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors

from gtpo_megatron.errors import CheckpointError
from gtpo_megatron.weights.megatron.checkpoint_files import Verify, check_checkpoint
from gtpo_megatron.weights.megatron.restricted_pickle import (
    RestrictedPlanner,
    RestrictedReader,
    load_index,
    load_object,
    load_torch,
    refusal,
)

COMMON_FILE = "common.pt"


class CheckpointReader:
    """The ranks' part of one checkpoint, whole tensors whatever layout wrote it.

    Args:
        folder: of the checkpoint.
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
        found = {name: torch.empty(self.tensors[name][0], dtype=self.tensors[name][1]) for name in names}
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")  # that is the intent
                load_tensors(
                    found, storage_reader=RestrictedReader(self._folder), planner=RestrictedPlanner(), no_dist=True
                )
        except (Exception, CheckpointException) as error:
            raise CheckpointError(f"checkpoint {self._folder} {refusal(error)}") from error
        return found

    def read_object(self, name: str) -> Any:
        """An object that a rank stored, such as its random states.

        Raises:
            CheckpointError: it is not there once, cannot be read, or names what no checkpoint holds.
        """
        return load_object(self._folder, self._metadata, name)

    def read_common(self) -> Any:
        """Reads what all ranks share: optimizer groups, schedule, counters. None where Megatron stores it as an object.

        Raises:
            CheckpointError: as in :meth:`read_object`.
        """
        path = self._folder / COMMON_FILE
        return load_torch(path) if path.exists() else None
