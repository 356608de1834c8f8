"""Slots in the memory of a GPU that two processes share, one of which allocates them: CUDA IPC.

The handle travels in the file that has the counters. It is opened as memory of the device that the opening process
calls its own: the two may number the same GPU differently.
"""

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor
from torch.storage import TypedStorage

from gtpo_megatron.errors import WeightSyncError
from gtpo_megatron.weights.push.link import SLOTS
from gtpo_megatron.weights.push.transports.shared_memory import SlotFile

_DEVICE_ARGUMENT = 6
"""Place of the device's number in the arguments of ``torch.multiprocessing.reductions.rebuild_cuda_tensor``."""


_SLOTS: dict[int, Tensor] = {}
"""This process's slots by their size. Shared memory is not freed while a reader that was killed still counts as one,
so an engine that takes another one's place gets the same slots."""


def share_gpu_slots(file: SlotFile) -> Tensor:
    """The slots on this process's GPU, whose handle is published; they live as long as the process.

    Returns:
        ``[slots, bytes]`` uint8.
    """
    size = file.shape.slot_bytes
    if size not in _SLOTS:
        with _shareable_memory():
            _SLOTS[size] = torch.empty(SLOTS, size, dtype=torch.uint8, device="cuda")
    slots = _SLOTS[size]
    _, arguments = reduce_tensor(slots)  # type: ignore[no-untyped-call]
    file.publish(repr(arguments[_DEVICE_ARGUMENT:]).encode())  # from there on numbers and bytes
    return slots


@contextmanager
def _shareable_memory() -> Iterator[None]:
    """Allocations within can be opened by CUDA IPC, which those of expandable segments cannot.

    Ranks have expandable segments on; with them off, torch takes no block that one of them has left free.
    """
    before = _allocator_settings()
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(before)


def _allocator_settings() -> str:
    """The settings that torch's allocator was last given; torch 2.11 has them in its snapshot only."""
    if hasattr(torch._C, "_accelerator_getAllocatorSettings"):
        return torch._C._accelerator_getAllocatorSettings()
    return str(torch.cuda.memory._snapshot()["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"])


def open_gpu_slots(file: SlotFile) -> Tensor:
    """The slots that another process has published.

    Raises:
        WeightSyncError: they are on another GPU, or that process has gone.
    """
    size = file.shape.slot_bytes
    of_tensor = (Tensor, (SLOTS, size), (size, 1), 0, TypedStorage, torch.uint8)
    _, *handle = ast.literal_eval(file.published().decode())
    here = torch.cuda.current_device()
    try:
        return cast("Tensor", rebuild_cuda_tensor(*of_tensor, here, *handle))  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise WeightSyncError(
            f"transport relay: the memory that the trainer's rank offers cannot be opened on GPU {here}: {error}; rank "
            f"and worker of the same number must be on the same GPU"
        ) from error
