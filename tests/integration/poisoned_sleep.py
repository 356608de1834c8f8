"""Makes vLLM's CPU worker sleep as its GPU worker does, over memory that forgets.

vLLM's own code frees and allocates: ``gpu_worker.Worker.sleep`` and ``wake_up``, with a back end of the kind that it
lets one register. Where CuMem's unmaps memory, this one overwrites it: memory that sleeps, and memory that was just
allocated again, holds NaN, and in the cache numbers that are wrong but finite, since a CPU's attention multiplies what
is behind the end of a sequence by zero. So whatever nobody writes again shows, and so does what is written too early.
"""

import contextlib
import functools
from collections.abc import Iterable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from vllm.device_allocator.sleep_mode_backend import SleepModeBackend
from vllm.v1.worker import gpu_worker

LOST, WRONG = float("nan"), 3e4


class PoisonedMemory(SleepModeBackend):
    """Of one worker. CuMem's tags: what was allocated while the model was loaded, and the keys' and values' cache.

    Attributes:
        num_poisoned: tensors of the model that were overwritten when it was put to sleep last.
    """

    def __init__(self, worker: Any) -> None:
        super().__init__()
        self._worker = worker
        self._kept: list[tuple[Tensor, Tensor]] | None = None
        self._packed: list[tuple[torch.nn.Module, Any]] = []
        self.num_poisoned = 0

    def suspend(self, level: int = 1) -> None:
        """Level 1 keeps the weights on the host, level 2 nothing."""
        weights = self._weights()
        self.num_poisoned = len(weights)
        self._kept = [(tensor, tensor.clone()) for tensor in weights.values()] if level == 1 else None
        # of some layers a CPU's kernels have packed copies, which are memory like any other
        self._packed = [(layer, layer.cpu_linear) for layer in self._layers() if "cpu_linear" in vars(layer)]
        for layer, packed in self._packed:
            layer.cpu_linear = _lost(packed)
        self._forget(weights.values(), LOST)
        self._forget(self._cache(), WRONG)

    def resume(self, tags: list[str] | None = None) -> None:
        """What was written meanwhile is lost."""
        if tags is None or "weights" in tags:
            self._forget(self._weights().values(), LOST)
            if self._kept is not None:
                for tensor, kept in self._kept:
                    tensor.copy_(kept)
                for layer, packed in self._packed:
                    layer.cpu_linear = packed
        if tags is None or "kv_cache" in tags:
            self._forget(self._cache(), WRONG)

    def lost(self) -> list[str]:
        """Names of what nobody has written since."""
        return [name for name, tensor in self._weights().items() if bool(tensor.isnan().any())]

    def _layers(self) -> list[torch.nn.Module]:
        return list(self._worker.model_runner.model.modules())

    def _weights(self) -> dict[str, Tensor]:
        """Every tensor of the model, whether or not torch knows it for a parameter or a buffer; each memory once."""
        seen, found = {tensor.data_ptr() for tensor in self._cache()}, {}
        for prefix, layer in self._worker.model_runner.model.named_modules():
            own = {**layer._parameters, **layer._buffers, **vars(layer)}
            for name, tensor in own.items():
                if isinstance(tensor, Tensor) and tensor.numel() and tensor.data_ptr() not in seen:
                    seen.add(tensor.data_ptr())
                    found[f"{prefix}.{name}"] = tensor.data
        return found

    def _cache(self) -> list[Tensor]:
        return list(self._worker.model_runner.kv_caches)

    @staticmethod
    def _forget(tensors: Iterable[Tensor], value: float) -> None:
        for tensor in tensors:
            tensor.fill_(value if tensor.is_floating_point() else 77)


def _lost(packed: Any) -> Any:
    """A product with weights that are gone; the packed ones still know its shape."""
    return lambda *args: torch.full_like(packed(*args), float("nan"))


def install(worker: Any) -> None:
    """A call for ``collective_rpc``: of this worker, from now on. vLLM hands out a wrapper of it."""
    worker = worker.worker
    worker._sleep_mode_backend = PoisonedMemory(worker)
    worker.sleep = functools.partial(_with_accelerator, gpu_worker.Worker.sleep, worker)
    worker.wake_up = functools.partial(_with_accelerator, gpu_worker.Worker.wake_up, worker)


def _with_accelerator(method: Any, worker: Any, *args: Any, **kwargs: Any) -> Any:
    """There is nothing to wait for, and much memory is free."""
    with contextlib.ExitStack() as answers:
        for name, answer in {"synchronize": None, "get_memory_info": (1 << 30, 2 << 30), "empty_cache": None}.items():
            answers.enter_context(mock.patch.object(torch.accelerator, name, return_value=answer))
        return method(worker, *args, **kwargs)


def report(worker: Any) -> dict[str, Any]:
    """A call for ``collective_rpc``: how many tensors were overwritten, and which of them still are."""
    memory = worker.worker._sleep_mode_backend
    return {"num_poisoned": memory.num_poisoned, "lost": memory.lost()}
