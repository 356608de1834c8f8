"""Tiles in turns: the reduction of one tile runs on a second stream beside the product of the next one.

The first stream makes the logits of tile ``i + 1`` while the second one reads those of tile ``i``. In the backward pass
the first stream adds the gradient of tile ``i`` into those of hidden and weight while the second one makes that of tile
``i + 1``. Nothing else differs from `tiled_scores`, whose functions these stand in for. With one buffer, and on a CPU,
everything is on one stream.

Two sizes are apart here: logits may be few enough to stay in L2 between a product and its reduction, while the products
of the gradients take ``wide`` columns of such tiles together, in bfloat16: each product reads and writes hidden's
gradient ``[chunk, H]`` once in float32.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from benchmarks.gpu_proof.variants.streams import Streams, by_cublaslt
from gtpo_megatron.distributed import tiled_scores as present
from gtpo_megatron.distributed.tiled_scores import ScoreTask
from gtpo_megatron.kernels import partials
from gtpo_megatron.kernels.partials import SoftmaxSums
from gtpo_megatron.kernels.tiles import MIN_TILE_COLUMNS, TileKernels, accumulation_dtype, kernels_for, spans


@dataclass(frozen=True, kw_only=True)
class Turns:
    """How tiles are made.

    Attributes:
        tile_elements: logits of a tile, at least 512 columns.
        buffers: tiles in memory: 1, or 2 on two streams.
        wide_elements: of a gradient whose two products are computed together; at least a tile's.
        chunk_tokens: rows of a tile, instead of those that the caller asks for; 0: his.
        is_lt: products are cuBLASLt's.
        carved: multiprocessors that products leave to the reduction, which makes them cuBLASLt's.
        is_reader_first: the second stream goes before the first one, wherever both have a program to start.
        kernels: None: the present ones.
        merge: of the parts of all tiles; None: the present one.
    """

    tile_elements: int
    buffers: int = 1
    wide_elements: int = 0
    chunk_tokens: int = 0
    is_lt: bool = False
    carved: int = 0
    is_reader_first: bool = True
    kernels: TileKernels | None = None
    merge: Callable[[Tensor, Tensor | float], Tensor] | None = None

    def partials(self, hidden: Tensor, weight: Tensor, task: ScoreTask, chunk_tokens: int) -> Tensor:
        """`tiled_scores.linear_partials`."""
        num_tokens, rows = hidden.shape[0], task.true_rows(weight.shape[0])
        scores = hidden.new_empty((0,), dtype=accumulation_dtype(hidden.dtype))
        if not num_tokens or not rows:
            return partials.empty_table(1, num_tokens, like=scores.double())[0]
        kernels = self.kernels or kernels_for(hidden)
        chunk_tokens = min(self.chunk_tokens or chunk_tokens, num_tokens)
        width = self._width(chunk_tokens, rows)
        buffers = [scores.new_empty((chunk_tokens * width,)) for _ in range(self.buffers)]
        table = scores.new_empty((-(-rows // width), partials.NUM_FIELDS, num_tokens))
        targets = task.target_ids - task.first_row(weight.shape[0])
        temperature = task.tile_temperature(slice(0, num_tokens), scores)
        with self._products(hidden), self._streams(hidden) as streams:
            for chunk in spans(num_tokens, chunk_tokens):
                operand = present._operand(hidden[chunk], scores.dtype)
                for part, columns in enumerate(spans(rows, width)):
                    logits = _matrix(streams.next(buffers), chunk, columns)
                    present._matmul(operand, present._operand(weight[columns], scores.dtype).t(), out=logits)
                    with streams.reading():
                        kernels.reduce(
                            logits,
                            targets[chunk] - columns.start,
                            None if temperature is None else temperature[chunk],
                            table[part][:, chunk],
                            owned=True,
                            may_mask=False,
                        )
        return (self.merge or partials.merge)(table, task.merge_temperature(slice(0, num_tokens)))

    def gradients(  # noqa: PLR0913 - that of `tiled_scores`
        self,
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
        """`tiled_scores.linear_gradients`."""
        scores = hidden.new_empty((0,), dtype=accumulation_dtype(hidden.dtype))
        group = task.tp_group if reduce_hidden_grad and task.tp_size > 1 else None
        result = present._SummedChunks(hidden, group) if hidden_grad else None
        chunk_tokens = min(self.chunk_tokens or chunk_tokens, max(1, hidden.shape[0]))
        rows = task.true_rows(weight.shape[0])
        width = self._width(chunk_tokens, rows)
        wide = min(max(1, self.wide_elements // (chunk_tokens * width)), -(-max(1, rows) // width)) * width
        tiles = _Tiles(
            kernels=self.kernels or kernels_for(hidden),
            weight=weight,
            rows=rows,
            targets=task.target_ids - task.first_row(weight.shape[0]),
            temperature=task.tile_temperature(slice(0, hidden.shape[0]), scores),
            sums=SoftmaxSums(*(total.to(scores.dtype) for total in saved)),
            grads=(grads[0].to(scores.dtype), None if grads[1] is None else grads[1].to(scores.dtype)),
            logits=[scores.new_empty((chunk_tokens * width,)) for _ in range(self.buffers)],
            # operand of the products: bfloat16 on a GPU
            gradients=[
                scores.new_empty((chunk_tokens * wide,), dtype=hidden.dtype if hidden.is_cuda else scores.dtype)
                for _ in range(self.buffers)
            ],
            width=width,
            wide=wide,
        )
        with self._products(hidden), self._streams(hidden) as streams:
            for chunk in spans(hidden.shape[0], chunk_tokens):
                operand = present._operand(hidden[chunk], scores.dtype)
                total = scores.new_zeros((operand.shape[0], hidden.shape[1])) if hidden_grad else None
                tiles.add_chunk(operand, chunk, total, weight_grad, streams)
                if result is not None and total is not None:
                    result.add(chunk, total)
        return None if result is None else result.finish()

    def _products(self, hidden: Tensor) -> AbstractContextManager[None]:
        return by_cublaslt(hidden.device, is_wanted=self.is_lt, carved=self.carved)

    def _streams(self, hidden: Tensor) -> Streams:
        return Streams(hidden.device, is_wanted=self.buffers > 1, is_reader_first=self.is_reader_first)

    def _width(self, chunk_tokens: int, rows: int) -> int:
        """Columns of a tile: a multiple of 512, and no more than there are."""
        whole = max(1, self.tile_elements // chunk_tokens // MIN_TILE_COLUMNS)
        return min(whole, -(-max(1, rows) // MIN_TILE_COLUMNS)) * MIN_TILE_COLUMNS


@dataclass(frozen=True, kw_only=True)
class _Tiles:
    """What the gradients of all tiles of a call need, converted once.

    Attributes:
        kernels: of the tiles.
        weight: ``[V/tp, H]``.
        rows: of it that are no padding.
        targets: ``[P]``, rows of ``weight``; others are held by other ranks.
        temperature: ``[P]`` ``1 / T``, or None for 1.
        sums: softmax sums ``[P]``.
        grads: of log-probs ``[P]``, and of entropy ``[P]`` or None.
        logits: buffers of a tile.
        gradients: buffers of ``wide`` columns.
        width: columns of a tile.
        wide: columns whose gradient is added together.
    """

    kernels: TileKernels
    weight: Tensor
    rows: int
    targets: Tensor
    temperature: Tensor | None
    sums: SoftmaxSums
    grads: tuple[Tensor, Tensor | None]
    logits: list[Tensor]
    gradients: list[Tensor]
    width: int
    wide: int

    def add_chunk(
        self, operand: Tensor, chunk: slice, total: Tensor | None, weight_grad: Tensor | None, streams: Streams
    ) -> None:
        """Adds the gradients of all columns; those of a block when the next one's logits are made."""

        def add(gradient: Tensor, block: slice, mark: Any) -> None:
            streams.wait(mark)
            if total is not None:
                present._add_matmul_(total, gradient, present._operand(self.weight[block], total.dtype))
            if weight_grad is not None:
                present._add_matmul_(weight_grad[block], gradient.t(), operand)

        waiting: list[tuple[Tensor, slice, Any]] = []
        for number, block in enumerate(spans(self.rows, self.wide)):
            gradient = _matrix(self.gradients[number % len(self.gradients)], chunk, block)
            for columns in spans(block.stop - block.start, self.width):
                inside = slice(block.start + columns.start, block.start + columns.stop)
                logits = _matrix(streams.next(self.logits), chunk, columns)
                present._matmul(operand, present._operand(self.weight[inside], logits.dtype).t(), out=logits)
                with streams.reading():
                    self._gradient(logits, chunk, inside.start, gradient[:, columns])
            waiting.append((gradient, block, streams.mark()))
            if len(waiting) == len(self.gradients):
                add(*waiting.pop(0))
        for one in waiting:
            add(*one)

    def _gradient(self, logits: Tensor, chunk: slice, first: int, out: Tensor) -> None:
        self.kernels.gradient(
            logits,
            self.targets[chunk] - first,
            None if self.temperature is None else self.temperature[chunk],
            SoftmaxSums(*(total[chunk] for total in self.sums)),
            self.grads[0][chunk],
            None if self.grads[1] is None else self.grads[1][chunk],
            out,
            may_mask=False,
        )


def _matrix(buffer: Tensor, rows: slice, columns: slice) -> Tensor:
    """The first elements of a buffer as a contiguous matrix."""
    shape = rows.stop - rows.start, columns.stop - columns.start
    return buffer[: shape[0] * shape[1]].view(shape)
