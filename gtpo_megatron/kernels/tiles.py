"""Selects the kernels of a device and the size of tiles."""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gtpo_megatron.kernels import torch_tiles
from gtpo_megatron.kernels.partials import SoftmaxSums

CPU_TILE_ELEMENTS = 1 << 22
"""16 MiB of float32, which fit the last-level cache between the matrix product and the kernel."""

MIN_TILE_COLUMNS = 512
"""Narrower matrix products spend their time packing operands."""

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
    """Triton's on an NVIDIA GPU, unless the tensor is float64 or Triton is not installed; otherwise plain torch."""
    if not tensor.is_cuda or tensor.dtype == torch.float64 or importlib.util.find_spec("triton") is None:
        return TORCH_KERNELS
    from gtpo_megatron.kernels import triton_tiles

    return TileKernels(reduce=triton_tiles.reduce_tile, gradient=triton_tiles.gradient_tile)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, which gradient checks use; float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def spans(total: int, step: int) -> Iterator[slice]:
    """``[0, total)`` in slices of at most ``step``."""
    return (slice(start, min(start + step, total)) for start in range(0, total, step))


def tile_columns(num_rows: int, tensor: Tensor) -> int:
    """Number of columns of a tile of ``num_rows`` rows, a multiple of ``MIN_TILE_COLUMNS``.

    A width that 8 does not divide would leave cuBLAS the kernels of older GPUs only: a third of the rate on an H100.
    """
    elements = GPU_TILE_ELEMENTS if tensor.is_cuda else CPU_TILE_ELEMENTS
    whole = elements // max(1, num_rows) // MIN_TILE_COLUMNS
    return max(1, whole) * MIN_TILE_COLUMNS
