"""Memory without page faults: temporaries that a loop uses again and again, results on huge pages.

A first touch of 4 KiB costs more than writing them: for a batch of float32 results half the time of a whole pass.
"""

import contextlib
import math
import mmap

import torch
from torch import Tensor

_LAZY_FROM_BYTES = 1 << 22
"""Two huge pages; below, the allocator's memory is likely to be warm."""


def lazy_zeros(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that take memory only where they are written: on a CPU fresh pages of the system's, huge ones if it can.

    Args:
        shape: of the result.
        dtype: of the result.
        device: of the result.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or num_bytes < _LAZY_FROM_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)  # keeps the pages as long as it lives


class Scratch:
    """Named buffers on one device; each grows to its largest use.

    Args:
        device: of all buffers.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, tuple[int, Tensor]] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor with undefined values; the same memory at every call with this name."""
        size = math.prod(shape)
        held, buffer = self._buffers.get(name, (0, None))
        if buffer is None or held < size or buffer.dtype != dtype:
            buffer = torch.empty(size, dtype=dtype, device=self._device)
            self._buffers[name] = (size, buffer)
        return torch.as_strided(buffer, shape, tuple(math.prod(shape[i + 1 :]) for i in range(len(shape))))

    def copy(self, name: str, values: Tensor, dtype: torch.dtype) -> Tensor:
        """``values`` in another dtype, in the buffer of this name."""
        return self.take(name, tuple(values.shape), dtype).copy_(values)
