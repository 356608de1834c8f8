"""CUDA's memory handles between processes without a GPU: what a GPU allocates is a file that every opener maps.

A process has a GPU and a number for it, which need not be the other process's number. torch's own
``rebuild_cuda_tensor`` runs as it is.
"""

import itertools
import types
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from gtpo_megatron.actor.cpu_experts import FinishedWork
from gtpo_megatron.weights.push.transports import gpu_slots


def install(folder: Path, *, gpu: int, number: int) -> None:
    """For the rest of this process, which must be forked for it.

    Args:
        folder: of the GPUs' memory.
        gpu: which one this process has.
        number: what this process calls it.
    """
    count = itertools.count()

    def allocate(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
        assert device == "cuda"
        path = folder / f"{gpu}-{next(count)}"
        size = torch.Size(shape).numel()
        memory = torch.from_file(str(path), shared=True, size=size, dtype=dtype).view(shape)
        memory.handle = path.name.encode()  # type: ignore[attr-defined]
        return memory

    def reduce(memory: Any) -> tuple[Any, tuple[Any, ...]]:
        place = (number, memory.handle, memory.nbytes, 0, False, b"counter", 0, b"event", True)
        of_tensor = (torch.Tensor, memory.shape, memory.stride(), 0, torch.storage.TypedStorage, memory.dtype)
        return rebuild_cuda_tensor, (*of_tensor, *place)

    def opened(device: int, handle: bytes, size: int, *_: Any) -> torch.UntypedStorage:
        if device != number:
            raise RuntimeError("CUDA error: invalid device ordinal")
        if not handle.startswith(b"%d-" % gpu):
            raise RuntimeError("CUDA error: peer access is not supported between these two devices")
        return torch.from_file(
            str(folder / handle.decode()), shared=True, size=size, dtype=torch.uint8
        ).untyped_storage()

    cuda: Any = torch.cuda
    cuda.current_device = lambda: number
    cuda.current_stream = FinishedWork
    cuda._lazy_init = lambda: None
    torch.UntypedStorage._new_shared_cuda = staticmethod(opened)  # type: ignore[method-assign,assignment]
    vars(gpu_slots).update(
        torch=types.SimpleNamespace(empty=allocate, uint8=torch.uint8, cuda=cuda, _C=torch._C), reduce_tensor=reduce
    )
