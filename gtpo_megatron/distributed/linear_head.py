"""The output layer fused with the scores: only one tile of logits is in memory at a time.

For each chunk of tokens the vocabulary is processed in tiles of a few megabytes. The forward pass keeps a few numbers
per token; the backward pass recomputes every tile and overwrites it with its gradient.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gtpo_megatron.distributed.score_task import ScoreTask
from gtpo_megatron.kernels import partials
from gtpo_megatron.kernels.partials import SoftmaxSums
from gtpo_megatron.kernels.tiles import (
    TileKernels,
    accumulation_dtype,
    kernels_for,
    spans,
    tile_columns,
)


def linear_partials(hidden: Tensor, weight: Tensor, task: ScoreTask, chunk_tokens: int) -> Tensor:
    """Partial sums over this rank's columns.

    Args:
        hidden: ``[P, H]``.
        weight: ``[V/tp, H]``, same dtype.
        task: what to score.
        chunk_tokens: tokens per tile.

    Returns:
        ``[fields, P]`` float64. Collectives: none.
    """
    scores = hidden.new_empty((0,), dtype=accumulation_dtype(hidden.dtype))
    kernels = kernels_for(hidden)
    num_tokens, rows = hidden.shape[0], task.true_rows(weight.shape[0])
    merged = partials.empty_table(1, num_tokens, like=scores.double())[0]
    sizes = {chunk.stop - chunk.start for chunk in spans(num_tokens, chunk_tokens)}
    # one tile for all chunks: a chunk's own would be made while the last one's is still there
    largest = max((size * min(tile_columns(size, hidden), weight.shape[0]) for size in sizes), default=0)
    buffer = scores.new_empty((largest,))
    for chunk in spans(num_tokens, chunk_tokens):
        size = chunk.stop - chunk.start
        width = tile_columns(size, hidden)
        table = partials.empty_table(-(-rows // width), size, like=scores)
        operand = _operand(hidden[chunk], scores.dtype)
        targets = task.target_ids[chunk] - task.first_row(weight.shape[0])
        temperature = task.tile_temperature(chunk, scores)
        for part, columns in enumerate(spans(rows, width)):
            logits = buffer[: size * (columns.stop - columns.start)].view(size, -1)
            _matmul(operand, _operand(weight[columns], scores.dtype).t(), out=logits)
            kernels.reduce(logits, targets - columns.start, temperature, table[part], owned=True, may_mask=False)
        if rows:
            merged[:, chunk] = partials.merge(table, task.merge_temperature(chunk))
    return merged


def linear_gradients(  # noqa: PLR0913 - tensors of one backward pass, each used once
    hidden: Tensor,
    weight: Tensor,
    task: ScoreTask,
    chunk_tokens: int,
    saved: SoftmaxSums,
    grads: tuple[Tensor, Tensor | None],
    *,
    hidden_grad: bool,
    weight_grad: Tensor | None,
    reduce_hidden_grad: bool,
) -> Tensor | None:
    """Recomputes each tile of logits and adds its gradient to those of hidden and weight.

    Args:
        hidden: ``[P, H]``.
        weight: ``[V/tp, H]``.
        task: what was scored.
        chunk_tokens: as in the forward pass.
        saved: softmax sums ``[P]`` of the forward pass.
        grads: gradients of log-probs ``[P]`` and of entropy ``[P]`` or None.
        hidden_grad: whether hidden needs a gradient.
        weight_grad: ``[V/tp, H]`` float32 or float64, added to in place; None if not needed.
        reduce_hidden_grad: sum hidden's gradient over the tp group.

    Returns:
        Gradient of hidden ``[P, H]`` of its dtype, or None.

    Collectives: one all-reduce per chunk over ``tp_group``, overlapped with the next chunk, if ``reduce_hidden_grad``.
    """
    scores = hidden.new_empty((0,), dtype=accumulation_dtype(hidden.dtype))
    kernels = kernels_for(hidden)
    group = task.tp_group if reduce_hidden_grad and task.tp_size > 1 else None
    result = _SummedChunks(hidden, group) if hidden_grad else None
    for chunk in spans(hidden.shape[0], chunk_tokens):
        operand = _operand(hidden[chunk], scores.dtype)
        total = scores.new_zeros((operand.shape[0], hidden.shape[1])) if hidden_grad else None
        _chunk_gradients(operand, weight, task, chunk, saved, grads, kernels, total, weight_grad, scores)
        if result is not None and total is not None:
            result.add(chunk, total)
    return None if result is None else result.finish()


def _chunk_gradients(  # noqa: PLR0913 - one loop body, split off for its length
    operand: Tensor,
    weight: Tensor,
    task: ScoreTask,
    chunk: slice,
    saved: SoftmaxSums,
    grads: tuple[Tensor, Tensor | None],
    kernels: TileKernels,
    hidden_grad: Tensor | None,
    weight_grad: Tensor | None,
    scores: Tensor,
) -> None:
    sums = SoftmaxSums(*(total[chunk].to(scores.dtype) for total in saved))
    grad_logprobs = grads[0][chunk].to(scores.dtype)
    grad_entropy = None if grads[1] is None else grads[1][chunk].to(scores.dtype)
    size, width = operand.shape[0], tile_columns(operand.shape[0], operand)
    buffer = scores.new_empty((size * min(width, weight.shape[0]),))
    # Operand of the matrix products: bfloat16 on a GPU, the tile itself elsewhere.
    gradients = buffer if operand.dtype == scores.dtype else torch.empty_like(buffer, dtype=operand.dtype)
    targets = task.target_ids[chunk] - task.first_row(weight.shape[0])
    temperature = task.tile_temperature(chunk, scores)
    for columns in spans(task.true_rows(weight.shape[0]), width):
        count = size * (columns.stop - columns.start)
        logits = buffer[:count].view(size, -1)
        gradient = logits if gradients is buffer else gradients[:count].view(size, -1)
        rows = _operand(weight[columns], scores.dtype)
        _matmul(operand, rows.t(), out=logits)
        kernels.gradient(
            logits,
            targets - columns.start,
            temperature,
            sums,
            grad_logprobs,
            grad_entropy,
            gradient,
            may_mask=False,
        )
        if hidden_grad is not None:
            _add_matmul_(hidden_grad, gradient, rows)
        if weight_grad is not None:
            _add_matmul_(weight_grad[columns], gradient.t(), operand)


class _SummedChunks:
    """Collects the chunks of hidden's gradient, each summed over the tp group while the next one is computed."""

    def __init__(self, hidden: Tensor, tp_group: dist.ProcessGroup | None) -> None:
        self._result = torch.empty_like(hidden)
        self._tp_group = tp_group
        self._pending: tuple[slice, Tensor, Any] | None = None

    def add(self, chunk: slice, total: Tensor) -> None:
        work = None if self._tp_group is None else dist.all_reduce(total, group=self._tp_group, async_op=True)
        self._store_pending()
        self._pending = (chunk, total, work)

    def finish(self) -> Tensor:
        self._store_pending()
        return self._result

    def _store_pending(self) -> None:
        if self._pending is None:
            return
        chunk, total, work = self._pending
        if work is not None:
            work.wait()
        self._result[chunk] = total
        self._pending = None


def _operand(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Casts to ``dtype`` on a CPU, whose bfloat16 products would round the logits; a GPU accumulates in float32."""
    return tensor.detach() if tensor.is_cuda else tensor.detach().to(dtype)


def _matmul(left: Tensor, right: Tensor, *, out: Tensor) -> None:
    if left.dtype == out.dtype:
        torch.mm(left, right, out=out)
    else:
        torch.mm(left, right, out_dtype=out.dtype, out=out)


def _add_matmul_(total: Tensor, left: Tensor, right: Tensor) -> None:
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        # cuBLAS adds in its epilogue: no temporary of float32 products, and no second pass over the sum
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
