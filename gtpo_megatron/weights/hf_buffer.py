"""A whole model in Hugging Face layout in one shared-memory file, written slice by slice by the ranks that hold them.

No rank gathers anything: each writes its own boxes straight to where they belong. Readers see full tensors without a
copy. The same buffer serves the weight push and the export.
"""

import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gtpo_megatron.errors import WeightMappingError, WeightSyncError
from gtpo_megatron.weights.checksum import slice_checksum
from gtpo_megatron.weights.param_mapping import SliceCopy

SHARED_MEMORY = Path("/dev/shm")
"""Where the file lives; a memory file system on every Linux."""

ALIGNMENT_BYTES = 64
"""Start of every tensor, one cache line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferLayout:
    """Which tensor lies where.

    Attributes:
        path: of the file, on a memory file system.
        dtype_name: ``float32`` or ``bfloat16``, of every tensor.
        shapes: name -> shape, in file order.
    """

    path: str
    dtype_name: str
    shapes: dict[str, tuple[int, ...]]

    @property
    def dtype(self) -> torch.dtype:
        """Of every tensor."""
        found = getattr(torch, self.dtype_name)
        assert isinstance(found, torch.dtype)
        return found

    def offsets(self) -> tuple[dict[str, int], int]:
        """Byte offset of every tensor, and the size of the file."""
        offsets, end = {}, 0
        for name, shape in self.shapes.items():
            offsets[name] = end
            num_bytes = torch.Size(shape).numel() * self.dtype.itemsize
            end += -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return offsets, end


class HFBuffer:
    """The mapped file. The mapping outlives the file's name, so the name is removed as soon as all have opened it."""

    def __init__(self, layout: BufferLayout) -> None:
        self.layout = layout
        offsets, num_bytes = layout.offsets()
        try:
            flat = torch.from_file(layout.path, shared=True, size=num_bytes, dtype=torch.uint8)
        except RuntimeError as error:
            raise WeightSyncError(
                f"cannot map {num_bytes / 2**20:.1f} MiB of shared memory at {layout.path}: {error}; "
                f"enlarge the memory file system (for a container: --shm-size)"
            ) from error
        self._tensors: dict[str, Tensor] = {}
        for name, shape in layout.shapes.items():
            num = torch.Size(shape).numel() * layout.dtype.itemsize
            self._tensors[name] = flat[offsets[name] : offsets[name] + num].view(layout.dtype).view(shape)

    def __getitem__(self, name: str) -> Tensor:
        """The tensor, a view of shared memory."""
        try:
            return self._tensors[name]
        except KeyError as error:
            raise WeightMappingError(
                f"no tensor {name!r} in the buffer; it holds {len(self._tensors)} tensors"
            ) from error

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Every name and tensor, in file order."""
        yield from self._tensors.items()

    def write(self, plan: Sequence[SliceCopy], parameters: Mapping[str, Tensor]) -> None:
        """Copies this rank's slices to their places, rounding to the buffer's dtype."""
        for copy in plan:
            target = as_matrix(self[copy.hf_name])[copy.hf_box.slices]
            target.copy_(as_matrix(parameters[copy.megatron_name])[copy.megatron_box.slices])

    def checksums(self, plan: Sequence[SliceCopy], parameters: Mapping[str, Tensor]) -> dict[str, int]:
        """This rank's share of every tensor's checksum, taken from the parameters themselves.

        Shares add up (modulo 2^64) to ``tensor_checksum`` of the full tensors.
        """
        sums: dict[str, int] = {}
        for copy in plan:
            box = as_matrix(parameters[copy.megatron_name])[copy.megatron_box.slices].to(self.layout.dtype)
            columns = as_matrix(self[copy.hf_name]).shape[1]
            share = slice_checksum(box, row=copy.hf_box.row, column=copy.hf_box.column, num_columns=columns)
            sums[copy.hf_name] = (sums.get(copy.hf_name, 0) + share) % 2**64
        return sums


def new_layout(shapes: Mapping[str, tuple[int, ...]], dtype_name: str) -> BufferLayout:
    """A layout under a file name that nobody else uses."""
    path = SHARED_MEMORY / f"gtpo_megatron_{uuid.uuid4().hex}"
    return BufferLayout(path=str(path), dtype_name=dtype_name, shapes=dict(shapes))


def allocate(layout: BufferLayout) -> None:
    """Makes the file with all its memory; one that grows when it is written would kill the writer when memory is short.

    Raises:
        WeightSyncError: the memory file system is too small.
    """
    _, num_bytes = layout.offsets()
    try:
        descriptor = os.open(layout.path, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
        finally:
            os.close(descriptor)
    except OSError as error:
        remove_name(layout)
        raise WeightSyncError(
            f"no room for {num_bytes / 2**20:.1f} MiB of weights at {layout.path}: {error.strerror}; "
            f"enlarge the memory file system (for a container: --shm-size)"
        ) from error


def as_matrix(tensor: Tensor) -> Tensor:
    """``[rows, columns]``; a vector is one column."""
    return tensor if tensor.ndim == 2 else tensor.reshape(-1, 1)


def remove_name(layout: BufferLayout) -> None:
    """Unlinks the file; its memory is freed when the last process that mapped it ends, however it ends."""
    Path(layout.path).unlink(missing_ok=True)
