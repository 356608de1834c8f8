"""What ``torch.cuda`` says of an H100, and which tensors Transformer Engine takes for a GPU's."""

import contextlib
import sys
import types
from typing import Any

import torch

from gtpo_megatron.actor.cpu_experts import FinishedWork

CAPABILITY = (9, 0)


class FinishedStream(FinishedWork):
    """A stream, or an event, whose work is done."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def record(self, stream: object = None) -> None:
        """Work is already done."""

    def wait(self, stream: object = None) -> None:
        """Work is already done."""

    def query(self) -> bool:
        """Work is already done."""
        return True


def install() -> None:
    """Answers for the whole process, which must not meet a GPU."""
    assert not torch.cuda.is_available(), "the stand-ins would hide the GPU"
    cuda: Any = torch.cuda
    cuda.get_device_properties = lambda *_: types.SimpleNamespace(
        name="NVIDIA H100 80GB HBM3",
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        multi_processor_count=132,
        total_memory=80 << 30,
    )
    cuda.get_device_capability = lambda *_: CAPABILITY
    cuda.device_count = lambda: 1
    cuda.set_device = cuda.manual_seed = cuda.manual_seed_all = lambda _: None
    cuda.is_current_stream_capturing = lambda: False
    cuda.Stream = cuda.Event = FinishedStream
    cuda.nvtx = types.SimpleNamespace(
        range_push=lambda _: None, range_pop=lambda: None, range=lambda _: contextlib.nullcontext()
    )
    # the project and torch choose their kernels by the same two answers
    is_cuda: Any = torch.Tensor.is_cuda
    torch.Tensor.is_cuda = property(  # type: ignore[assignment]
        lambda tensor: _is_asked_by_transformer_engine() or is_cuda.__get__(tensor)
    )
    cuda.is_available = lambda: _is_asked_by_transformer_engine()  # noqa: PLW0108 - one frame further down


def _is_asked_by_transformer_engine() -> bool:
    """Whether the caller of the caller is one of its modules."""
    return sys._getframe(2).f_globals.get("__name__", "").startswith("transformer_engine.")
