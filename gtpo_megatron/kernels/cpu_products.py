"""Which library computes torch's float32 matrix products on a CPU, and where it may round their operands to bfloat16.

MKL uses AVX2 on processors that are not Intel's; oneDNN uses what the processor has, AVX512 included. torch (2.13)
gives it float32 products only if they may be rounded to bfloat16 (``fp32_precision = "bf16"``). oneDNN makes use of
that permission with AMX only; without AMX its products are those of float32. docs/numerics.md has the errors.

So a float32 model's products go to oneDNN where there is no AMX. With AMX those of its backward passes do, rounded:
gradients bear it, and log-probs stay those of float32. And those of a bfloat16 model's output layer, whose operands are
bfloat16 and whose sums are float32: torch has no such product of its own.
"""

import functools
import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

MIN_HIDDEN_SIZE = 512
"""Of smaller models the products are too small to gain by it (docs/performance.md)."""

MAX_ERROR = 1e-5
"""Relative error of the product that is tried; rounding to bfloat16 would make it 1e-3."""


def leaves_avx512_to_onednn(processor: Mapping[str, Any]) -> bool:
    """Whether oneDNN is faster than MKL in float32, and has no way to round to bfloat16.

    Args:
        processor: as ``torch.cpu.get_capabilities`` describes it.
    """
    may_round = any(processor.get(name, False) for name in ("amx_tile", "amx_bf16", "amx_fp16"))
    is_intel = "intel" in str(processor.get("cpu_name", "")).lower()
    return (
        processor.get("architecture") == "x86_64" and bool(processor.get("avx512_f")) and not may_round and not is_intel
    )


def choose_products(hidden_size: int, *, may_round_gradients: bool = False) -> bool:
    """Hands this process's float32 products to oneDNN if that is faster and exact; True if so.

    With AMX it is not exact, and has those of ``BackwardPasses`` only. A rule, not a measurement: ranks on machines of
    one kind, and a resumed run, choose the same.

    Args:
        hidden_size: hidden size of the model.
        may_round_gradients: the model is float32, and no backward pass of it makes anything of the forward pass again.
    """
    mkldnn: Any = torch.backends.mkldnn
    BackwardPasses.are_rounded = may_round_gradients and hidden_size >= MIN_HIDDEN_SIZE and has_amx()
    if BackwardPasses.are_rounded:
        logger.info("float32 products of backward passes by oneDNN, which rounds their operands to bfloat16 for AMX")
    is_chosen = (
        hidden_size >= MIN_HIDDEN_SIZE
        and mkldnn.is_available()
        and leaves_avx512_to_onednn(torch.cpu.get_capabilities())
    )
    _switch("bf16" if is_chosen else "none")
    if is_chosen and (error := _error_of_a_product()) > MAX_ERROR:
        _switch("none")
        logger.warning("oneDNN rounds float32 products (relative error %.1e): MKL computes them", error)
        return False
    if is_chosen:
        logger.info("float32 products by oneDNN, which uses AVX512 here; MKL does not")
    return is_chosen


class BackwardPasses:
    """Products of a float32 model's backward passes, whose operands are rounded to bfloat16 where ``are_rounded``.

    The error is the rounding of two factors, at most 2^-7 of each term of a sum, as often up as down. Forward passes,
    and so log-probs and losses, are float32's. The choice is the whole process's, as the switch is.

    Attributes:
        are_rounded: as ``choose_products`` has chosen for this process.
    """

    are_rounded = False

    def begin_with(self, gradient_of: Tensor) -> None:
        """From the gradient of this tensor on, products are a backward pass's."""
        if self.are_rounded and gradient_of.requires_grad:
            gradient_of.register_hook(self._begin)  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """From here on they are not: MKL computes them, as all others where there is AMX."""
        if self.are_rounded:
            _switch("none")

    def _begin(self, _: Tensor) -> None:
        _switch("bf16")


def products_by_mkl() -> AbstractContextManager[None]:
    """MKL computes float32 products in the block, for many small ones; the switch is the whole process's."""
    return _float32_products("none")


def products_of(operand: Tensor) -> AbstractContextManager[None]:
    """In the block float32 products may round their operands to bfloat16, if ``operand`` is so and there is AMX.

    Those of numbers that bfloat16 holds are exact, and their sums float32.
    """
    is_rounded = operand.dtype == torch.bfloat16 and not operand.is_cuda and has_amx()
    return _float32_products("bf16") if is_rounded else nullcontext()


def products_of_forward_pass() -> AbstractContextManager[None]:
    """In the block, where a backward pass makes something of the forward pass again, products are as they were."""
    return _float32_products("none") if BackwardPasses.are_rounded else nullcontext()


@functools.cache
def has_amx() -> bool:
    """The processor multiplies tiles of bfloat16, and oneDNN is there to have it do so."""
    mkldnn: Any = torch.backends.mkldnn
    return bool(mkldnn.is_available() and torch.cpu.get_capabilities().get("amx_bf16", False))


def _switch(precision: str) -> str:
    """Sets what float32 products may be rounded to; returns what it was."""
    mkldnn: Any = torch.backends.mkldnn  # torch's stub has no such name
    before: str = mkldnn.matmul.fp32_precision
    mkldnn.matmul.fp32_precision = precision
    return before


@contextmanager
def _float32_products(precision: str) -> Iterator[None]:
    before = _switch(precision)
    try:
        yield
    finally:
        _switch(before)


def _error_of_a_product() -> float:
    """Relative error of a product of numbers that bfloat16 cannot hold."""
    size = 256  # torch gives smaller products to MKL in any case
    value = 1 + 2.0**-10
    product = torch.full((size, size), value) @ torch.full((size, size), value)
    return float((product.double() / (size * value * value) - 1).abs().max())
