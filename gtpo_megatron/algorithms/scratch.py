"""Memory that a loop over blocks uses again and again: temporaries stay in cache and cause no page faults."""

import math

import torch
from torch import Tensor


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
