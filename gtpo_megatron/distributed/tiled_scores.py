"""Scores tile by tile: of given logits, or of the output layer's input.

Given logits are read tile by tile and not changed. For the output layer, each chunk of tokens takes the vocabulary in
tiles of a few megabytes. The forward pass keeps a few numbers per token; the backward pass recomputes every tile, if
they were not few enough to keep, and overwrites it with its gradient.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gtpo_megatron.kernels import partials
from gtpo_megatron.kernels.cpu_products import products_of_forward_pass
from gtpo_megatron.kernels.partials import SoftmaxSums
from gtpo_megatron.kernels.tiles import (
    TileKernels,
    accumulation_dtype,
    kernels_for,
    spans,
    tile_columns,
)

COLUMNS = 16_384
"""Columns per tile of given logits."""

MERGED_PARTIALS = 1 << 18
"""Partials that are merged together, of all tiles: 2 MiB of a field in float64, all tokens of a GPU's micro-batch."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScoreTask:
    """The options of one call, for all of its tiles, forward and backward.

    Attributes:
        target_ids: ``[P]`` int64, ids in the whole vocabulary.
        inverse_temperature: ``1 / T``: a float, or ``[P]`` float64.
        vocab_size: true size of the vocabulary; further columns are padding.
        entropy_grad: whether the entropy is differentiable.
        tp_group: ranks that share the vocabulary; None: one rank.
    """

    target_ids: Tensor
    inverse_temperature: float | Tensor
    vocab_size: int
    entropy_grad: bool
    tp_group: dist.ProcessGroup | None

    @property
    def num_tokens(self) -> int:
        """``P``."""
        return int(self.target_ids.shape[0])

    @property
    def tp_size(self) -> int:
        """Number of ranks that share the vocabulary."""
        return 1 if self.tp_group is None else dist.get_world_size(self.tp_group)

    def first_row(self, local_rows: int) -> int:
        """Id of this rank's first vocabulary row."""
        return 0 if self.tp_group is None else local_rows * dist.get_rank(self.tp_group)

    def true_rows(self, local_rows: int) -> int:
        """Number of this rank's rows that are not padding."""
        return min(local_rows, max(0, self.vocab_size - self.first_row(local_rows)))

    def tile_temperature(self, rows: slice, like: Tensor) -> Tensor | None:
        """``1 / T`` of the tokens ``rows`` for the kernels; None if it is 1."""
        if isinstance(self.inverse_temperature, Tensor):
            return self.inverse_temperature[rows].to(like.dtype)
        if self.inverse_temperature == 1.0:
            return None
        return like.new_full((rows.stop - rows.start,), self.inverse_temperature)

    def merge_temperature(self, rows: slice) -> float | Tensor:
        """``1 / T`` of the tokens ``rows`` for `partials.merge` and `partials.finish`."""
        if isinstance(self.inverse_temperature, Tensor):
            return self.inverse_temperature[rows]
        return self.inverse_temperature


def logits_partials(logits: Tensor, task: ScoreTask) -> Tensor:
    """Partial sums over this rank's columns.

    Args:
        logits: ``[P, V/tp]``, not changed.
        task: inputs of the scores.

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
        task: inputs of the forward pass.
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


def linear_partials(
    hidden: Tensor, weight: Tensor, task: ScoreTask, chunk_tokens: int, kept: list[Tensor] | None = None
) -> Tensor:
    """Partial sums over this rank's columns.

    Args:
        hidden: ``[P, H]``.
        weight: ``[V/tp, H]``, same dtype.
        task: inputs of the scores.
        chunk_tokens: tokens per tile.
        kept: where tiles of logits are kept for backward; None: nowhere.

    Returns:
        ``[fields, P]`` float64. Collectives: none.
    """
    scores = hidden.new_empty((0,), dtype=accumulation_dtype(hidden.dtype))
    kernels = kernels_for(hidden)
    num_tokens, rows = hidden.shape[0], task.true_rows(weight.shape[0])
    if not num_tokens or not rows:
        return partials.empty_table(1, num_tokens, like=scores.double())[0]
    sizes = {chunk.stop - chunk.start for chunk in spans(num_tokens, chunk_tokens)}
    # one tile for all chunks: a chunk's own would be made while the last one's is still there
    largest = max(size * min(tile_columns(size, hidden), weight.shape[0]) for size in sizes)
    buffer = scores.new_empty((largest if kept is None else 0,))
    # one table for all chunks: a merge is twenty launches; a smaller chunk has fewer parts
    num_parts = max(-(-rows // tile_columns(size, hidden)) for size in sizes)
    table = partials.empty_table(num_parts, num_tokens, like=scores)
    targets = task.target_ids - task.first_row(weight.shape[0])
    temperature = task.tile_temperature(slice(0, num_tokens), scores)
    for chunk in spans(num_tokens, chunk_tokens):
        size = chunk.stop - chunk.start
        operand = _operand(hidden[chunk], scores.dtype)
        for part, columns in enumerate(spans(rows, tile_columns(size, hidden))):
            width = columns.stop - columns.start
            if kept is None:
                logits = buffer[: size * width].view(size, -1)
            else:
                logits = scores.new_empty((size, width))
                kept.append(logits)
            _matmul(operand, _operand(weight[columns], scores.dtype).t(), out=logits)
            kernels.reduce(
                logits,
                targets[chunk] - columns.start,
                None if temperature is None else temperature[chunk],
                table[part, :, chunk],
                owned=kept is None,
                may_mask=False,
            )
    merged = scores.new_empty(table.shape[1:], dtype=torch.float64)
    for block in spans(num_tokens, max(1, MERGED_PARTIALS // num_parts)):
        merged[:, block] = partials.merge(table[:, :, block], task.merge_temperature(block))
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
    kept: list[Tensor] | None = None,
) -> Tensor | None:
    """Recomputes each tile of logits, unless it was kept, and adds its gradient to those of hidden and weight.

    Args:
        hidden: ``[P, H]``.
        weight: ``[V/tp, H]``.
        task: inputs of the forward pass.
        chunk_tokens: chunk of the forward pass.
        saved: softmax sums ``[P]`` of the forward pass.
        grads: gradients of log-probs ``[P]`` and of entropy ``[P]`` or None.
        hidden_grad: whether hidden needs a gradient.
        weight_grad: ``[V/tp, H]`` float32 or float64, added to in place; None if not needed.
        reduce_hidden_grad: sum hidden's gradient over the tp group.
        kept: what the forward pass kept, which is overwritten.

    Returns:
        Gradient of hidden ``[P, H]`` of its dtype, or None.

    Collectives: one all-reduce per chunk over ``tp_group``, overlapped with the next chunk, if ``reduce_hidden_grad``.
    """
    scores = hidden.new_empty((0,), dtype=accumulation_dtype(hidden.dtype))
    kernels = kernels_for(hidden)
    group = task.tp_group if reduce_hidden_grad and task.tp_size > 1 else None
    result = _SummedChunks(hidden, group) if hidden_grad else None
    # once, not for every chunk or tile: a gradient of one number for all tokens is expanded, which kernels cannot read
    saved = SoftmaxSums(*(total.to(scores.dtype) for total in saved))
    grad_entropy = None if grads[1] is None else grads[1].to(scores.dtype).contiguous()
    grads = grads[0].to(scores.dtype).contiguous(), grad_entropy
    tiles = None if kept is None else iter(kept)
    for chunk in spans(hidden.shape[0], chunk_tokens):
        operand = _operand(hidden[chunk], scores.dtype)
        total = scores.new_zeros((operand.shape[0], hidden.shape[1])) if hidden_grad else None
        _chunk_gradients(operand, weight, task, chunk, saved, grads, kernels, total, weight_grad, scores, tiles)
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
    tiles: Iterator[Tensor] | None,
) -> None:
    sums = SoftmaxSums(*(total[chunk] for total in saved))
    grad_logprobs = grads[0][chunk]
    grad_entropy = None if grads[1] is None else grads[1][chunk]
    size, width = operand.shape[0], tile_columns(operand.shape[0], operand)
    buffer = scores.new_empty((size * min(width, weight.shape[0]) if tiles is None else 0,))
    # Operand of the matrix products: bfloat16 on a GPU, the tile itself elsewhere.
    gradients = buffer if operand.dtype == scores.dtype else torch.empty_like(buffer, dtype=operand.dtype)
    targets = task.target_ids[chunk] - task.first_row(weight.shape[0])
    temperature = task.tile_temperature(chunk, scores)
    for columns in spans(task.true_rows(weight.shape[0]), width):
        count = size * (columns.stop - columns.start)
        rows = _operand(weight[columns], scores.dtype)
        if tiles is None:
            logits = buffer[:count].view(size, -1)
            with products_of_forward_pass():
                _matmul(operand, rows.t(), out=logits)
        else:
            logits = next(tiles)
        gradient = logits if gradients is buffer else gradients[:count].view(size, -1)
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
    """Casts to ``dtype`` on a CPU, whose bfloat16 products would round the logits; a GPU accumulates in float32.

    With AMX those of a bfloat16 layer are bfloat16 in the product all the same (``kernels.cpu_products.products_of``).
    """
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
