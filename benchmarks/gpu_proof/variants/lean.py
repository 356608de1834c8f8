"""The two kernels of a tile with fewer instructions a logit: one maximum of a block of a row, then one pass over it.

`triton_tiles` keeps three sums a lane and merges 2,048 lanes once a row: 37 instructions a logit at 8,192 columns. Here
a block of a row is in registers: its maximum, then ``e = exp2((z - m) log2(e) / T)``, ``S = sum e``, ``u = sum e d``:
13 instructions. Where ``S`` is at least `PEAKED_SUM`, ``r = S - 1`` keeps its digits; else the block is summed again
without its maximum. Both kernels have the contracts of `torch_tiles`. They also run with few programs, each of which
takes many rows, and so leave the other multiprocessors to a product on another stream.
"""

# Triton parses the kernels' signatures: pointers and sizes without Python types.
# ruff: noqa: ANN001, ANN202, N803, PLR0913
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from benchmarks.gpu_proof.variants.block_math import LN_2, LOG2_E, LOWEST_DISTANCE, block_sums, merged, target_gradient
from gtpo_megatron.kernels.partials import SoftmaxSums
from gtpo_megatron.kernels.tiles import TileKernels


@triton.jit
def _reduce_kernel(
    logits_ptr,
    targets_ptr,
    inverse_temperature_ptr,
    out_ptr,
    num_rows,
    num_columns,
    row_stride,
    field_stride,
    HAS_TEMPERATURE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Each program takes every ``num_programs``-th row, from the last one, which the product may have left in L2."""
    for index in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        row = num_rows - 1 - index
        row_ptr = logits_ptr + row.to(tl.int64) * row_stride
        scale = tl.full((1,), 1.0, tl.float32)
        if HAS_TEMPERATURE:
            scale *= tl.load(inverse_temperature_ptr + row)
        maximum = tl.full((1,), float("-inf"), tl.float32)
        rest = tl.full((1,), 0.0, tl.float32)
        weighted = tl.full((1,), 0.0, tl.float32)
        for start in range(0, num_columns, COLUMNS):
            columns = start + tl.arange(0, COLUMNS)[None, :]
            z = tl.load(row_ptr + columns, mask=columns < num_columns, other=float("-inf")).to(tl.float32)
            high, others, sums = block_sums(z, scale)
            maximum, rest, weighted = merged(maximum, rest, weighted, high, others, sums, scale)
        target = tl.load(targets_ptr + row)
        is_held = (target >= 0) & (target < num_columns)
        at_target = tl.load(row_ptr + target, mask=is_held, other=float("-inf")).to(tl.float32)
        one = out_ptr + row + tl.arange(0, 1)
        tl.store(one, maximum)
        tl.store(one + field_stride, rest)
        tl.store(one + 2 * field_stride, weighted)
        tl.store(out_ptr + 3 * field_stride + row, at_target)


@triton.jit
def _gradient_kernel(
    logits_ptr,
    out_ptr,
    targets_ptr,
    inverse_temperature_ptr,
    maximum_ptr,
    rest_ptr,
    surprise_ptr,
    grad_logprobs_ptr,
    grad_entropy_ptr,
    num_rows,
    num_columns,
    row_stride,
    out_row_stride,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """``c e`` with one number ``c`` a row, or ``(c + c_H d) e`` with a gradient of the entropy; the target by itself.

    ``out`` may be ``logits``.
    """
    num_blocks = tl.cdiv(num_columns, COLUMNS)
    for index in range(tl.program_id(0), num_rows * num_blocks, tl.num_programs(0)):
        row = num_rows - 1 - index // num_blocks
        start = (index % num_blocks) * COLUMNS
        columns = start + tl.arange(0, COLUMNS)
        inside = columns < num_columns
        row_ptr = logits_ptr + row.to(tl.int64) * row_stride
        z = tl.load(row_ptr + columns, mask=inside, other=float("-inf")).to(tl.float32)
        target = tl.load(targets_ptr + row)
        is_held = (target >= start) & (target < tl.minimum(start + COLUMNS, num_columns))
        at_target = tl.load(row_ptr + target, mask=is_held, other=0.0).to(tl.float32)
        scale = tl.load(inverse_temperature_ptr + row) if HAS_TEMPERATURE else 1.0
        maximum, rest = tl.load(maximum_ptr + row), tl.load(rest_ptr + row)
        grad = tl.load(grad_logprobs_ptr + row)
        surprise = tl.load(surprise_ptr + row) if HAS_ENTROPY else 0.0
        grad_entropy = tl.load(grad_entropy_ptr + row) if HAS_ENTROPY else 0.0
        at_target = target_gradient(at_target, maximum, rest, surprise, scale, grad, grad_entropy, HAS_ENTROPY)
        factor = -scale / (1.0 + rest)
        d = (z - maximum) * (scale * LOG2_E)
        gradient = tl.exp2(d)
        if HAS_ENTROPY:
            slope = factor * grad_entropy
            gradient *= (factor * grad + slope * surprise) + (slope * LN_2) * tl.maximum(d, LOWEST_DISTANCE)
        else:
            gradient *= factor * grad
        gradient = tl.where(columns == target, at_target, gradient)
        out_row_ptr = out_ptr + row.to(tl.int64) * out_row_stride
        tl.store(out_row_ptr + columns, gradient.to(out_ptr.dtype.element_ty), mask=inside)


@dataclass(frozen=True, kw_only=True, slots=True)
class LeanKernels:
    """Sizes of both kernels.

    Attributes:
        reduce_columns: that a program of the reduction holds in registers at a time.
        gradient_columns: the same of the gradient.
        reduce_warps: of a program.
        programs: at most so many, each of which takes rows in turns; 0: one a row, or a row's block.
    """

    reduce_columns: int = 8192
    gradient_columns: int = 2048
    reduce_warps: int = 8
    programs: int = 0

    def kernels(self) -> TileKernels:
        """For `tiled_scores`."""
        return TileKernels(reduce=self.reduce, gradient=self.gradient)

    def reduce(
        self,
        logits: Tensor,
        target_columns: Tensor,
        inverse_temperature: Tensor | None,
        out: Tensor,
        *,
        owned: bool,
        may_mask: bool,
    ) -> None:
        """See `torch_tiles.reduce_tile`; logits are not changed, and both flags are ignored."""
        del owned, may_mask
        rows, columns = logits.shape
        if rows == 0:
            return
        _reduce_kernel[(min(rows, self.programs or rows),)](
            logits,
            target_columns,
            out if inverse_temperature is None else inverse_temperature,
            out,
            rows,
            columns,
            logits.stride(0),
            out.stride(0),
            HAS_TEMPERATURE=inverse_temperature is not None,
            COLUMNS=min(self.reduce_columns, triton.next_power_of_2(columns)),
            num_warps=self.reduce_warps,
        )

    def gradient(
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
        """See `torch_tiles.gradient_tile`; the flag is ignored."""
        del may_mask
        rows, columns = logits.shape
        if rows == 0:
            return
        block = min(self.gradient_columns, triton.next_power_of_2(columns))
        blocks = rows * triton.cdiv(columns, block)
        _gradient_kernel[(min(blocks, self.programs or blocks),)](
            logits,
            out,
            target_columns,
            grad_logprobs if inverse_temperature is None else inverse_temperature,
            sums.maximum,
            sums.rest,
            sums.surprise,
            grad_logprobs.contiguous(),
            grad_logprobs if grad_entropy is None else grad_entropy.contiguous(),
            rows,
            columns,
            logits.stride(0),
            out.stride(0),
            HAS_TEMPERATURE=inverse_temperature is not None,
            HAS_ENTROPY=grad_entropy is not None,
            COLUMNS=block,
            num_warps=8,
        )
