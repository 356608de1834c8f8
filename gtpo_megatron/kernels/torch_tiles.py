"""Partial sums and gradients of one tile of logits in plain torch, for CPUs and GPUs without Triton.

Both functions make several elementwise passes over blocks that fit a core's cache.
"""

import torch
from torch import Tensor

from gtpo_megatron.kernels.partials import (
    LOWEST,
    MAX,
    REST,
    TARGET,
    WEIGHTED,
    SoftmaxSums,
)

BLOCK_ELEMENTS = 1 << 17
"""Elements of a block per thread: 512 KiB of float32; smaller blocks cost more synchronisation of threads."""

PEAKED_SUM = 1.02
"""Below this sum of exponentials the maximum's term 1 costs the rest two digits; it is then summed without it."""

UNSHIFTED_LIMIT = 60.0
"""Largest magnitude of a maximum for which ``exp(z)`` is safe in float32 without subtracting it."""


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
        target_columns: ``[n]`` int64, the target's column in this tile; outside ``[0, c)`` if another tile has it.
        inverse_temperature: ``[n]`` of the dtype of ``out``, or None for 1.
        out: ``[fields, n]`` float32 or float64, overwritten.
        owned: ``logits`` is scratch of the dtype of ``out`` and may be overwritten.
        may_mask: logits may be ``-inf`` (columns that the caller excludes).

    Communication: none.
    """
    _read_targets(logits, target_columns, out)
    plain = inverse_temperature is None and not may_mask
    if plain and logits.dtype == out.dtype and _reduce_unshifted(logits, out):
        return
    distances = logits if owned else logits.to(out.dtype, copy=True)
    maxima, totals, weighted = out[MAX], out[REST], out[WEIGHTED]
    step = _block_rows(distances)
    scratch = torch.empty_like(distances[:step])
    for start in range(0, len(distances), step):
        rows = slice(start, start + step)
        block = distances[rows]
        maximum = torch.amax(block, dim=1, out=maxima[rows])
        if may_mask:
            maximum.clamp_(min=torch.finfo(out.dtype).min)
        _to_distances_(block, maximum, inverse_temperature, rows, may_mask=may_mask)
        exponential = torch.exp(block, out=scratch[: len(block)])
        torch.sum(exponential, dim=1, out=totals[rows])
        torch.sum(exponential.mul_(block), dim=1, out=weighted[rows])
    out[REST] -= 1
    _sum_again_where_peaked(distances, None, out)


def _reduce_unshifted(logits: Tensor, out: Tensor) -> bool:
    """Like `reduce_tile`, with sums of ``exp(z)`` instead of ``exp(z - m)``: one pass fewer, logits unchanged.

    ``r = e^-m sum exp(z) - 1`` and ``u = e^-m (sum z exp(z) - m sum exp(z))``. The difference costs up to ``|m|``
    float32 roundings, 4e-6 nats of entropy; peaked rows are summed again around their maximum.

    Returns:
        False if a maximum is beyond ``UNSHIFTED_LIMIT`` or NaN; ``out`` is then not valid.
    """
    maxima, totals, weighted = out[MAX], out[REST], out[WEIGHTED]
    step = _block_rows(logits)
    scratch = torch.empty_like(logits[:step])
    for start in range(0, len(logits), step):
        rows = slice(start, start + step)
        block = logits[rows]
        torch.amax(block, dim=1, out=maxima[rows])
        exponential = torch.exp(block, out=scratch[: len(block)])
        torch.sum(exponential, dim=1, out=totals[rows])
        torch.sum(exponential.mul_(block), dim=1, out=weighted[rows])
    if not bool((maxima.abs() <= UNSHIFTED_LIMIT).all()):
        return False
    maximum, total = maxima.double(), totals.double()
    scale = torch.exp(-maximum)
    weighted.copy_((weighted.double() - maximum * total) * scale)
    totals.copy_(total * scale - 1)
    _sum_again_where_peaked(logits, maxima, out)
    return True


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
        sums: ``[n]`` each, over the whole vocabulary.
        grad_logprobs: ``[n]``, ``g``.
        grad_entropy: ``[n]``, ``g_H``, or None without a gradient of the entropy.
        out: ``[n, c]`` of any float dtype, overwritten; the maths uses that of ``sums``. If ``logits`` is ``out``, both
            have that dtype; otherwise logits are not changed.
        may_mask: as in `reduce_tile`.

    Communication: none.
    """
    factor = -1 / (1 + sums.rest) if inverse_temperature is None else -inverse_temperature / (1 + sums.rest)
    held = ((target_columns >= 0) & (target_columns < logits.shape[1])).nonzero().squeeze(1)
    columns = target_columns[held]
    distance_at_target = logits[held, columns].to(factor.dtype) - sums.maximum[held]
    distances = logits if out is logits else logits.to(factor.dtype, copy=True)
    constant = factor * grad_logprobs
    slope = None if grad_entropy is None else factor * grad_entropy
    if slope is not None:
        constant = constant + slope * sums.surprise
    step = _block_rows(distances)
    scratch = None if slope is None else torch.empty_like(distances[:step])
    for start in range(0, len(distances), step):
        rows = slice(start, start + step)
        block = _to_distances_(distances[rows], sums.maximum[rows], inverse_temperature, rows, may_mask=may_mask)
        if slope is None or scratch is None:
            block.exp_().mul_(constant[rows, None])
        else:
            exponential = torch.exp(block, out=scratch[: len(block)])
            torch.addcmul(constant[rows, None], block, slope[rows, None], out=block).mul_(exponential)
    if out is not logits:
        out.copy_(distances)
    # exp(d) - (1 + r) loses all digits if the target has nearly all the mass; expm1(d) - r is exact.
    if inverse_temperature is not None:
        distance_at_target *= inverse_temperature[held]
    gradient = (torch.expm1(distance_at_target) - sums.rest[held]) * grad_logprobs[held]
    if grad_entropy is not None:
        surprise = distance_at_target.clamp(min=LOWEST) + sums.surprise[held]
        gradient += distance_at_target.exp() * surprise * grad_entropy[held]
    out[held, columns] = (gradient * factor[held]).to(out.dtype)


def _block_rows(tile: Tensor) -> int:
    elements = BLOCK_ELEMENTS * torch.get_num_threads() if tile.device.type == "cpu" else tile.numel()
    return max(1, elements // max(1, tile.shape[1]))


def _to_distances_(
    block: Tensor, maximum: Tensor, inverse_temperature: Tensor | None, rows: slice, *, may_mask: bool
) -> Tensor:
    """``d_v = (z_v - m) / T``, in place."""
    block.sub_(maximum[:, None])
    if inverse_temperature is not None:
        block.mul_(inverse_temperature[rows, None])
    return block.clamp_(min=LOWEST) if may_mask else block


def _sum_again_where_peaked(tile: Tensor, maxima: Tensor | None, out: Tensor) -> None:
    """Recomputes the sums of peaked rows without the maximum's term.

    Args:
        tile: ``[n, c]`` distances, or logits whose ``maxima`` are still to be subtracted.
        maxima: ``[n]``; None for distances, whose weighted sum needs no correction.
        out: ``[fields, n]``.
    """
    peaked = (out[REST] < PEAKED_SUM - 1).nonzero().squeeze(1)
    step = _block_rows(tile)
    for start in range(0, len(peaked), step):  # in blocks, since a sharp policy has more peaked rows than others
        rows = peaked[start : start + step]
        others = tile[rows] if maxima is None else tile[rows].sub_(maxima[rows, None])
        winners = others.argmax(1, keepdim=True)
        exponential = others.exp().scatter_(1, winners, 0.0)
        out[REST, rows] = exponential.sum(1)
        if maxima is not None:
            out[WEIGHTED, rows] = exponential.mul_(others).sum(1)
        del others, exponential  # before the next ones are made


def _read_targets(logits: Tensor, target_columns: Tensor, out: Tensor) -> None:
    held = (target_columns >= 0) & (target_columns < logits.shape[1])
    values = logits.gather(1, target_columns.clamp(0, logits.shape[1] - 1)[:, None]).squeeze(1)
    out[TARGET] = torch.where(held, values.to(out.dtype), -torch.inf)
