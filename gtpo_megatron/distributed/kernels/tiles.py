"""Which kernels serve a device, how large a tile is, and what all tiles of one call share."""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from gtpo_megatron.distributed.kernels import torch_tiles
from gtpo_megatron.distributed.kernels.partials import SoftmaxSums

CPU_TILE_ELEMENTS = 1 << 22
"""16 MiB of float32: what the matrix product writes is read again from the last-level cache, not from memory."""

MIN_TILE_COLUMNS = 512
"""Narrower products waste time packing their operands; a chunk so long that this matters has larger tiles."""

GPU_TILE_ELEMENTS = 1 << 25
"""128 MiB of float32: large enough to fill the device, small beside one activation."""


class ReduceTile(Protocol):
    """Writes the partials of one tile; see `torch_tiles.reduce_tile`."""

    def __call__(
        self,
        logits: Tensor,
        target_columns: Tensor,
        inverse_temperature: Tensor | None,
        out: Tensor,
        *,
        owned: bool,
        may_mask: bool,
    ) -> None:
        """Overwrites ``out``."""


class GradientTile(Protocol):
    """Writes the gradient of one tile; see `torch_tiles.gradient_tile`."""

    def __call__(
        self,
        logits: Tensor,
        target_columns: Tensor,
        inverse_temperature: Tensor | None,
        sums: SoftmaxSums,
        grad_logprobs: Tensor,
        grad_entropy: Tensor | None,
        out: Tensor,
        *,
        may_mask: bool,
    ) -> None:
        """Overwrites ``out``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TileKernels:
    """The two kernels of a device."""

    reduce: ReduceTile
    gradient: GradientTile


TORCH_KERNELS = TileKernels(reduce=torch_tiles.reduce_tile, gradient=torch_tiles.gradient_tile)


def kernels_for(tensor: Tensor) -> TileKernels:
    """Triton's on an NVIDIA GPU, unless the tensor is float64 or Triton is not installed; plain torch elsewhere."""
    if not tensor.is_cuda or tensor.dtype == torch.float64 or importlib.util.find_spec("triton") is None:
        return TORCH_KERNELS
    from gtpo_megatron.distributed.kernels import triton_tiles

    return TileKernels(reduce=triton_tiles.reduce_tile, gradient=triton_tiles.gradient_tile)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScoreTask:
    """What one call scores: the same for all of its tiles, forward and backward.

    Attributes:
        target_ids: ``[P]`` int64, ids in the whole vocabulary.
        inverse_temperature: ``1 / T``: a float, or ``[P]`` float64.
        vocab_size: true size of the vocabulary; columns from it on are padding.
        entropy_grad: whether the entropy is differentiable.
        with_second_moment: whether ``sum_v p_v^2`` is wanted.
        tp_group: ranks that share the vocabulary; None is one rank.
    """

    target_ids: Tensor
    inverse_temperature: float | Tensor
    vocab_size: int
    entropy_grad: bool
    with_second_moment: bool
    tp_group: dist.ProcessGroup | None

    @property
    def num_tokens(self) -> int:
        """``P``."""
        return int(self.target_ids.shape[0])

    @property
    def tp_size(self) -> int:
        """Ranks that share the vocabulary."""
        return 1 if self.tp_group is None else dist.get_world_size(self.tp_group)

    def first_row(self, local_rows: int) -> int:
        """Id of this rank's first vocabulary row."""
        return 0 if self.tp_group is None else local_rows * dist.get_rank(self.tp_group)

    def true_rows(self, local_rows: int) -> int:
        """How many of this rank's rows are no padding; padding is at the end of the vocabulary."""
        return min(local_rows, max(0, self.vocab_size - self.first_row(local_rows)))

    def tile_temperature(self, rows: slice, like: Tensor) -> Tensor | None:
        """``1 / T`` of the tokens ``rows``, as the kernels want it; None for 1."""
        if isinstance(self.inverse_temperature, Tensor):
            return self.inverse_temperature[rows].to(like.dtype)
        if self.inverse_temperature == 1.0:
            return None
        return like.new_full((rows.stop - rows.start,), self.inverse_temperature)

    def merge_temperature(self, rows: slice) -> float | Tensor:
        """``1 / T`` of the tokens ``rows`` for `partials.merge` and `partials.finish`."""
        if isinstance(self.inverse_temperature, Tensor):
            return self.inverse_temperature[rows]
        return self.inverse_temperature


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, which gradient checks use; float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def spans(total: int, step: int) -> Iterator[slice]:
    """``[0, total)`` in slices of at most ``step``."""
    return (slice(start, min(start + step, total)) for start in range(0, total, step))


def tile_columns(num_rows: int, tensor: Tensor) -> int:
    """Columns of a tile of ``num_rows`` rows."""
    elements = GPU_TILE_ELEMENTS if tensor.is_cuda else CPU_TILE_ELEMENTS
    return max(MIN_TILE_COLUMNS, elements // max(1, num_rows))
