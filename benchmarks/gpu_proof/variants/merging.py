"""`partials.merge` of many parts in one launch instead of twenty: float64 all the same, in any order of the parts."""

# Triton parses the kernels' signatures: pointers and sizes without Python types.
# ruff: noqa: ANN001, ANN202, N803, PLR0913
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.gpu_proof.variants.block_math import LEAST, LOWEST_DISTANCE, merged
from gtpo_megatron.kernels.partials import MAX, NUM_FIELDS, REST, TARGET, WEIGHTED

TOKENS = 32
"""Of a program: a warp reads 128 bytes of a field."""

PARTS = 32
"""That a program merges at a time."""

_MAX, _REST = tl.constexpr(MAX), tl.constexpr(REST)
_WEIGHTED, _TARGET = tl.constexpr(WEIGHTED), tl.constexpr(TARGET)


@triton.jit
def _merge_kernel(
    table_ptr,
    inverse_temperature_ptr,
    out_ptr,
    num_parts,
    num_tokens,
    part_stride,
    field_stride,
    out_stride,
    HAS_TEMPERATURE: tl.constexpr,
    PARTS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """A program has ``TOKENS`` tokens and goes through all parts, ``PARTS`` at a time."""
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = tokens < num_tokens
    scale = tl.full((TOKENS,), 1.0, tl.float64)
    if HAS_TEMPERATURE:
        scale *= tl.load(inverse_temperature_ptr + tokens, mask=inside, other=1.0).to(tl.float64)
    maximum = tl.full((TOKENS,), float("-inf"), tl.float64)
    target = tl.full((TOKENS,), float("-inf"), tl.float64)
    rest = tl.zeros((TOKENS,), tl.float64)
    weighted = tl.zeros((TOKENS,), tl.float64)
    lane = tl.arange(0, PARTS)[:, None]
    for start in range(0, num_parts, PARTS):
        part = start + lane
        is_part = (part < num_parts) & inside[None, :]
        here = table_ptr + part.to(tl.int64) * part_stride + tokens[None, :]
        m = tl.load(here + _MAX * field_stride, mask=is_part, other=float("-inf")).to(tl.float64)
        r = tl.load(here + _REST * field_stride, mask=is_part, other=0.0).to(tl.float64)
        u = tl.load(here + _WEIGHTED * field_stride, mask=is_part, other=0.0).to(tl.float64)
        t = tl.load(here + _TARGET * field_stride, mask=is_part, other=float("-inf")).to(tl.float64)
        high = tl.max(m, axis=0)
        winner = tl.argmax(m, axis=0)
        d = tl.maximum((m - tl.maximum(high, LEAST)[None, :]) * scale[None, :], LOWEST_DISTANCE)
        weight = tl.exp(d)
        others = tl.where(lane == winner[None, :], 0.0, weight)
        block_rest = tl.sum(weight * r + others, axis=0)
        block_weighted = tl.sum(weight * (u + d * (1.0 + r)), axis=0)
        maximum, rest, weighted = merged(maximum, rest, weighted, high, block_rest, block_weighted, scale)
        target = tl.maximum(target, tl.max(t, axis=0))
    out_ptr += tokens
    tl.store(out_ptr + _MAX * out_stride, maximum, mask=inside)
    tl.store(out_ptr + _REST * out_stride, rest, mask=inside)
    tl.store(out_ptr + _WEIGHTED * out_stride, weighted, mask=inside)
    tl.store(out_ptr + _TARGET * out_stride, target, mask=inside)


def merge(table: Tensor, inverse_temperature: Tensor | float) -> Tensor:
    """`partials.merge`: ``[S, fields, P]`` float32 to ``[fields, P]`` float64, of tokens that have a logit."""
    num_parts, _, num_tokens = table.shape
    out = torch.empty((NUM_FIELDS, num_tokens), dtype=torch.float64, device=table.device)
    if not isinstance(inverse_temperature, Tensor) and inverse_temperature != 1.0:
        inverse_temperature = out.new_full((num_tokens,), inverse_temperature)
    has_temperature = isinstance(inverse_temperature, Tensor)
    _merge_kernel[(triton.cdiv(num_tokens, TOKENS),)](
        table,
        inverse_temperature if has_temperature else table,
        out,
        num_parts,
        num_tokens,
        table.stride(0),
        table.stride(1),
        out.stride(0),
        HAS_TEMPERATURE=has_temperature,
        PARTS=PARTS,
        TOKENS=TOKENS,
        num_warps=4,
    )
    return out
