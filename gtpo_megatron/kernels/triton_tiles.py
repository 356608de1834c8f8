"""Partial sums and gradients of one tile of logits in Triton, in one pass over the tile each.

They have the contracts of `torch_tiles`, their reference, and compute in float32. They also run on CPU tensors under
``TRITON_INTERPRET=1``.
"""

# Triton parses the kernels' signatures: pointers and sizes without Python types.
# ruff: noqa: ANN001, ANN202, PLR0913
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import triton
import triton.language as tl
from torch import Tensor

from gtpo_megatron.kernels.partials import LOWEST, SoftmaxSums

REDUCE_COLUMNS = 2048
"""Lanes of a program, and columns that it reads at a time: eight a thread, whose three sums stay in registers."""

GRADIENT_COLUMNS = 2048
"""Columns that one program of the elementwise gradient kernel handles."""

_LOWEST = tl.constexpr(LOWEST)


@triton.jit
def _reduce_kernel(
    logits_ptr,
    targets_ptr,
    inverse_temperature_ptr,
    out_ptr,
    num_columns,
    row_stride,
    field_stride,
    HAS_TEMPERATURE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program per row: an online softmax that keeps the maximum's term 1 out of the sum (see `partials`).

    Each of ``COLUMNS`` lanes keeps the partial of the columns that it has read; lanes are merged once, at the end, so
    that a block of columns costs one exponential a column and no reduction over the program's threads. A lane with
    maximum ``m`` takes up a logit ``z`` by ``e = exp(-|z - m| / T)``: if ``z`` is the smaller one, its term is ``e``;
    else ``e`` scales what was there, and the old maximum's term, which was not in the sum, is ``e``.
    """
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    scale = tl.load(inverse_temperature_ptr + row) if HAS_TEMPERATURE else 1.0
    lane = tl.arange(0, COLUMNS)
    maximum = tl.full((COLUMNS,), float("-inf"), tl.float32)
    rest = tl.zeros((COLUMNS,), tl.float32)
    weighted = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, num_columns, COLUMNS):
        columns = start + lane
        z = tl.load(logits_ptr + columns, mask=columns < num_columns, other=float("-inf")).to(tl.float32)
        d = tl.maximum(-tl.abs(z - maximum) * scale, _LOWEST)
        # the first logit of a lane has nothing before it, and an excluded column takes no part
        d = tl.where((maximum == float("-inf")) | (z == float("-inf")), _LOWEST, d)
        # NaN and infinite logits must give NaN; comparisons may have ignored them
        d = tl.where((z != z) | (z == float("inf")), float("nan"), d)
        e = tl.exp(d)
        wins = z > maximum
        weighted = tl.where(wins, e * (weighted + d * (1.0 + rest)), weighted + e * d)
        rest = tl.where(wins, e * rest, rest) + e
        maximum = tl.where(wins, z, maximum)
    lanes_maximum, lanes_rest, lanes_weighted = maximum, rest, weighted
    maximum = tl.max(lanes_maximum, axis=0)
    winner = tl.argmax(lanes_maximum, axis=0)
    d = tl.maximum((lanes_maximum - maximum) * scale, _LOWEST)
    d = tl.where(lanes_maximum == float("-inf"), _LOWEST, d)
    e = tl.exp(d)
    # e = 0 drops a lane that has met no logit; one that is not finite has left NaN in its lane's sums
    rest = tl.sum(e * lanes_rest + tl.where(lane == winner, 0.0, e), axis=0)
    weighted = tl.sum(e * (lanes_weighted + d * (1.0 + lanes_rest)), axis=0)
    target = tl.load(targets_ptr + row)
    is_held = (target >= 0) & (target < num_columns)
    at_target = tl.load(logits_ptr + target, mask=is_held, other=float("-inf")).to(tl.float32)
    out_ptr += row
    tl.store(out_ptr, maximum)
    tl.store(out_ptr + field_stride, rest)
    tl.store(out_ptr + 2 * field_stride, weighted)
    tl.store(out_ptr + 3 * field_stride, at_target)


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
    num_columns,
    row_stride,
    out_row_stride,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program per row and block of columns; ``out`` may be ``logits``."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < num_columns
    scale = tl.load(inverse_temperature_ptr + row) if HAS_TEMPERATURE else 1.0
    maximum = tl.load(maximum_ptr + row)
    rest = tl.load(rest_ptr + row)
    grad = tl.load(grad_logprobs_ptr + row)
    target = tl.load(targets_ptr + row)
    z = tl.load(logits_ptr + row * row_stride + columns, mask=inside, other=float("-inf")).to(tl.float32)
    d = tl.maximum((z - maximum) * scale, _LOWEST)
    d = tl.where(z != z, z, d)
    e = tl.exp(d)
    # exp(d) - (1 + r) loses all digits if the target has nearly all the mass, so expm1 is computed by its series.
    near = d * (1.0 + d * (0.5 + d * (0.16666667 + d * 0.041666668)))
    expm1 = tl.where(d > -0.03, near, e - 1.0)
    numerator = grad * tl.where(columns == target, expm1 - rest, e)
    if HAS_ENTROPY:
        numerator += tl.load(grad_entropy_ptr + row) * e * (d + tl.load(surprise_ptr + row))
    gradient = numerator * (-scale / (1.0 + rest))
    tl.store(out_ptr + row * out_row_stride + columns, gradient.to(out_ptr.dtype.element_ty), mask=inside)


def reduce_tile(
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
    if logits.shape[0] == 0:
        return
    _reduce_kernel[(logits.shape[0],)](
        logits,
        target_columns,
        out if inverse_temperature is None else inverse_temperature,
        out,
        logits.shape[1],
        logits.stride(0),
        out.stride(0),
        HAS_TEMPERATURE=inverse_temperature is not None,
        COLUMNS=min(REDUCE_COLUMNS, triton.next_power_of_2(logits.shape[1])),
        num_warps=8,
    )


def gradient_tile(
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
    if logits.shape[0] == 0:
        return
    columns = min(GRADIENT_COLUMNS, triton.next_power_of_2(logits.shape[1]))
    _gradient_kernel[(logits.shape[0], triton.cdiv(logits.shape[1], columns))](
        logits,
        out,
        target_columns,
        grad_logprobs if inverse_temperature is None else inverse_temperature,
        sums.maximum,
        sums.rest,
        sums.surprise,
        grad_logprobs.contiguous(),
        grad_logprobs if grad_entropy is None else grad_entropy.contiguous(),
        logits.shape[1],
        logits.stride(0),
        out.stride(0),
        HAS_TEMPERATURE=inverse_temperature is not None,
        HAS_ENTROPY=grad_entropy is not None,
        COLUMNS=columns,
        num_warps=8,
    )
