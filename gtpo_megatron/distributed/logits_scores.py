"""Scores of given logits, which are read block by block and not changed."""

import torch
from torch import Tensor

from gtpo_megatron.distributed.score_task import ScoreTask
from gtpo_megatron.kernels import partials
from gtpo_megatron.kernels.partials import SoftmaxSums
from gtpo_megatron.kernels.tiles import accumulation_dtype, kernels_for, spans, tile_columns

COLUMNS = 16_384
"""Columns per tile."""


def logits_partials(logits: Tensor, task: ScoreTask) -> Tensor:
    """Partial sums over this rank's columns.

    Args:
        logits: ``[P, V/tp]``, not changed.
        task: what to score.

    Returns:
        ``[fields, P]`` float64. Collectives: none.
    """
    scores = logits.new_empty((0,), dtype=accumulation_dtype(logits.dtype))
    kernels = kernels_for(logits)
    num_tokens, rows = logits.shape[0], task.true_rows(logits.shape[1])
    merged = partials.empty_table(1, num_tokens, like=scores.double())[0]
    for block in spans(num_tokens, _rows_of_block(logits)):
        size = block.stop - block.start
        targets = task.target_ids[block] - task.first_row(logits.shape[1])
        temperature = task.tile_temperature(block, scores)
        table = partials.empty_table(-(-rows // COLUMNS), size, like=scores)
        for part, columns in enumerate(spans(rows, COLUMNS)):
            tile = logits.detach()[block, columns]
            kernels.reduce(tile, targets - columns.start, temperature, table[part], owned=False, may_mask=True)
        if rows:
            merged[:, block] = partials.merge(table, task.merge_temperature(block))
    return merged


def logits_gradient(
    logits: Tensor,
    task: ScoreTask,
    saved: SoftmaxSums,
    grads: tuple[Tensor, Tensor | None],
) -> Tensor:
    """Gradient of the logits; 0 at padding.

    Args:
        logits: ``[P, V/tp]``.
        task: what was scored.
        saved: softmax sums ``[P]`` of the forward pass.
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
        sums = SoftmaxSums(*(total[block].to(scores.dtype) for total in saved))
        for columns in spans(rows, COLUMNS):
            kernels.gradient(
                logits.detach()[block, columns],
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
