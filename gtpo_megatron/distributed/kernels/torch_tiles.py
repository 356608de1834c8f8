"""Partial sums and gradients of one tile of logits in plain torch: the path of CPUs, and of GPUs without Triton.

Both functions walk over blocks that stay in a core's cache, since they are a handful of elementwise passes.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from gtpo_megatron.distributed.kernels import partials
from gtpo_megatron.distributed.kernels.partials import MAX, REST, SQUARE, TARGET, WEIGHTED, SoftmaxSums

BLOCK_ELEMENTS = 1 << 17
"""Elements of one block for each thread: 512 KiB of float32 for the distances and as much for their exponentials."""

PEAKED_SUM = 1.02
"""Below this sum of exponentials the 1 of the maximum would cost the rest two digits: sum again without it."""


def reduce_tile(
    logits: Tensor,
    target_columns: Tensor,
    inverse_temperature: Tensor | None,
    out: Tensor,
    *,
    owned: bool,
    may_mask: bool,
) -> None:
    """Writes the partials of one tile.

    Args:
        logits: ``[n, c]``, any float dtype, contiguous along ``c``.
        target_columns: ``[n]`` int64, the target's column in this tile; outside ``[0, c)`` where another tile has it.
        inverse_temperature: ``[n]`` of the dtype of ``out``, or None for 1.
        out: ``[fields, n]`` float32 or float64, overwritten.
        owned: ``logits`` is scratch of the dtype of ``out`` and may be overwritten.
        may_mask: logits may be ``-inf``, as columns that a truncation removed.

    Communication: none.
    """
    _read_targets(logits, target_columns, out)
    for rows in _row_blocks(logits):
        block = logits[rows]
        maximum = block.amax(1).to(out.dtype)
        if may_mask:
            maximum.clamp_(min=torch.finfo(out.dtype).min)
        distance = _distances(block, maximum, inverse_temperature, rows, in_place=owned, may_mask=may_mask)
        exponential = distance.exp()
        total = exponential.sum(1)
        out[MAX, rows] = maximum
        out[REST, rows] = total.sub_(1)
        _sum_again_where_peaked(distance, exponential, out[REST, rows])
        if out.shape[0] > SQUARE:
            out[SQUARE, rows] = torch.linalg.vecdot(exponential, exponential)
        torch.sum(distance.mul_(exponential), dim=1, out=out[WEIGHTED, rows])


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
    """Gradient of one tile of logits: ``dL/dz_v = (g (1[v = y] - p_v) - g_H p_v (log p_v + H)) / T``.

    Args:
        logits: ``[n, c]``; may be ``out`` itself.
        target_columns: as in `reduce_tile`.
        inverse_temperature: ``[n]``, or None for 1.
        sums: ``[n]`` each, of the whole vocabulary.
        grad_logprobs: ``[n]``, ``g``.
        grad_entropy: ``[n]``, ``g_H``, or None where the entropy carries no gradient.
        out: ``[n, c]``, overwritten; its own dtype, the maths in that of ``sums``.
        may_mask: as in `reduce_tile`.

    Communication: none.
    """
    factor = -1 / (1 + sums.rest) if inverse_temperature is None else -inverse_temperature / (1 + sums.rest)
    in_place = out is logits and out.dtype == factor.dtype
    held = ((target_columns >= 0) & (target_columns < logits.shape[1])).nonzero().squeeze(1)
    columns = target_columns[held]
    at_target = logits[held, columns].to(factor.dtype)
    for rows in _row_blocks(logits):
        distance = _distances(
            logits[rows], sums.maximum[rows], inverse_temperature, rows, in_place=in_place, may_mask=may_mask
        )
        if grad_entropy is None:
            gradient = distance.exp_().mul_((factor * grad_logprobs)[rows, None])
        else:
            gradient = distance.exp()
            distance.add_(sums.surprise[rows, None]).mul_(grad_entropy[rows, None]).add_(grad_logprobs[rows, None])
            gradient.mul_(distance.mul_(factor[rows, None]))
        if not in_place or grad_entropy is not None:
            out[rows] = gradient
    # exp(d) - (1 + r) loses everything where the target has nearly all the mass; expm1(d) - r is exact there.
    distance = at_target - sums.maximum[held]
    if inverse_temperature is not None:
        distance *= inverse_temperature[held]
    gradient = (torch.expm1(distance) - sums.rest[held]) * grad_logprobs[held]
    if grad_entropy is not None:
        gradient += distance.exp() * (distance.clamp(min=partials.LOWEST) + sums.surprise[held]) * grad_entropy[held]
    out[held, columns] = (gradient * factor[held]).to(out.dtype)


def _row_blocks(logits: Tensor) -> Iterator[slice]:
    num_rows, num_columns = logits.shape
    elements = BLOCK_ELEMENTS * torch.get_num_threads() if logits.device.type == "cpu" else logits.numel()
    step = max(1, elements // max(1, num_columns))
    return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))


def _distances(
    block: Tensor, maximum: Tensor, inverse_temperature: Tensor | None, rows: slice, *, in_place: bool, may_mask: bool
) -> Tensor:
    """``d_v = (z_v - m) / T`` in the dtype of ``maximum``."""
    distance = block.sub_(maximum[:, None]) if in_place else torch.sub(block, maximum[:, None])
    if inverse_temperature is not None:
        distance.mul_(inverse_temperature[rows, None])
    return distance.clamp_(min=partials.LOWEST) if may_mask else distance


def _sum_again_where_peaked(distance: Tensor, exponential: Tensor, rest: Tensor) -> None:
    peaked = (rest < PEAKED_SUM - 1).nonzero().squeeze(1)
    if peaked.numel():
        others = exponential[peaked]
        others.scatter_(1, distance[peaked].argmax(1, keepdim=True), 0.0)
        rest[peaked] = others.sum(1)


def _read_targets(logits: Tensor, target_columns: Tensor, out: Tensor) -> None:
    held = (target_columns >= 0) & (target_columns < logits.shape[1])
    values = logits.gather(1, target_columns.clamp(0, logits.shape[1] - 1)[:, None]).squeeze(1)
    out[TARGET] = torch.where(held, values.to(out.dtype), -torch.inf)
