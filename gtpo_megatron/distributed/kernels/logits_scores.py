"""Scores from logits that somebody else made: blocks of them are read, none is changed."""

import torch
from torch import Tensor

from gtpo_megatron.distributed.kernels import partials, truncation
from gtpo_megatron.distributed.kernels.partials import SoftmaxSums
from gtpo_megatron.distributed.kernels.tiles import ScoreTask, accumulation_dtype, kernels_for, spans, tile_columns

COLUMNS = 16_384
"""Width of a tile of given logits; its rows follow from the size of a tile."""


def logits_partials(logits: Tensor, task: ScoreTask) -> tuple[Tensor, Tensor | None]:
    """Partials of this rank's columns, and the truncation's thresholds.

    Args:
        logits: ``[P, V/tp]``, left as it is.
        task: what to score.

    Returns:
        ``[fields, P]`` float64, and ``[P]`` thresholds or None.

    Collectives: none; with a truncation one all-gather of the logits a block over ``tp_group``.
    """
    scores = logits.new_empty((0,), dtype=accumulation_dtype(logits.dtype))
    kernels = kernels_for(logits)
    num_tokens, rows = logits.shape[0], task.true_rows(logits.shape[1])
    merged = partials.empty_table(1, num_tokens, with_square=task.with_second_moment, like=scores.double())[0]
    limits = scores.new_empty((num_tokens,)) if task.truncation else None
    for block in spans(num_tokens, _rows_of_block(logits)):
        size = block.stop - block.start
        targets = task.target_ids[block] - task.first_row(logits.shape[1])
        temperature = task.tile_temperature(block, scores)
        if task.truncation is not None and limits is not None:
            limits[block] = truncation.thresholds(
                logits[block].to(scores.dtype),
                task.truncation,
                task.merge_temperature(block),
                task.vocab_size,
                task.tp_group,
            )
        table = partials.empty_table(-(-rows // COLUMNS), size, with_square=task.with_second_moment, like=scores)
        for part, columns in enumerate(spans(rows, COLUMNS)):
            tile = _tile(logits, block, columns, limits, targets)
            kernels.reduce(
                tile, targets - columns.start, temperature, table[part], owned=limits is not None, may_mask=True
            )
        if rows:
            merged[:, block] = partials.merge(table, task.merge_temperature(block))
    return merged, limits


def logits_gradient(
    logits: Tensor,
    task: ScoreTask,
    saved: tuple[SoftmaxSums, Tensor | None],
    grads: tuple[Tensor, Tensor | None],
) -> Tensor:
    """Gradient of the logits; 0 at padding and at what a truncation removed.

    Args:
        logits: ``[P, V/tp]``.
        task: what was scored.
        saved: softmax sums ``[P]``, and thresholds ``[P]`` or None, of the forward pass.
        grads: gradients of log-probs ``[P]`` and of entropy ``[P]`` or None.

    Returns:
        ``[P, V/tp]`` of the dtype of ``logits``. Communication: none.
    """
    scores = logits.new_empty((0,), dtype=accumulation_dtype(logits.dtype))
    kernels = kernels_for(logits)
    rows = task.true_rows(logits.shape[1])
    result = torch.empty_like(logits, memory_format=torch.contiguous_format)
    result[:, rows:] = 0
    for block in spans(logits.shape[0], _rows_of_block(logits)):
        targets = task.target_ids[block] - task.first_row(logits.shape[1])
        sums = SoftmaxSums(*(total[block].to(scores.dtype) for total in saved[0]))
        for columns in spans(rows, COLUMNS):
            kernels.gradient(
                _tile(logits, block, columns, saved[1], targets),
                targets - columns.start,
                task.tile_temperature(block, scores),
                sums,
                grads[0][block].to(scores.dtype),
                None if grads[1] is None else grads[1][block].to(scores.dtype),
                result[block, columns],
                may_mask=True,
            )
    return result


def _rows_of_block(logits: Tensor) -> int:
    return max(1, tile_columns(min(COLUMNS, max(1, logits.shape[1])), logits))


def _tile(logits: Tensor, block: slice, columns: slice, limits: Tensor | None, targets: Tensor) -> Tensor:
    """A view of the logits, or a float32 copy of it with what the truncation removes set to ``-inf``."""
    tile = logits.detach()[block, columns]
    if limits is None:
        return tile
    tile = tile.to(limits.dtype, copy=True)
    truncation.drop_below_(tile, limits[block], targets - columns.start)
    return tile
