"""Entropy relative to other responses: the ``x`` and ``y`` of GTPO, the ``X`` and ``Y`` of GRPO-S.

Arithmetic: ``x[i,t] = H[i,t] / sum_{k in O+} H[k,t] * d_t`` [S 2; I 3] and ``y[j,t] = (1/H[j,t]) / sum_{k in O-}
(1/H[k,t]) * h_t`` [S 13; I 4]; geometric: ``x = H / (prod_{live O+} H)^(1/d_t)`` [I App. C]. The axis ``response``
compares with the response's own other tokens, ``matrix`` with all tokens of the set [S sec. 5]. ``H`` stands for
``clamp(H) + floor``.

Exactness: every weight is truncated to a grid that its segment's largest weight and number of terms fix (``2 ** -62``
    of
their product), and shares are made of the truncated weights: sums are exact in any order and ``sum x = d_t`` holds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gtpo_megatron.algorithms.portable_math import portable_exp, portable_log
from gtpo_megatron.algorithms.reduction import Reduction
from gtpo_megatron.algorithms.rows import block_elements
from gtpo_megatron.algorithms.scratch import Scratch
from gtpo_megatron.algorithms.segments import (
    NEVER,
    Chunk,
    Segment,
    SegmentPlan,
    chunks,
    length_lists,
    live_counts,
    plan_segments,
)
from gtpo_megatron.algorithms.share_grid import (
    LEAST_KNOWN_FLOOR,
    ShareRule,
    TokenWeights,
    check_positive,
    segment_scales,
    total_magic,
)
from gtpo_megatron.algorithms.table import ResponseTable


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """Shares of this rank's tokens.

    Attributes:
        values: ``[B, T]``, zero outside the mask.
        lowest: ``[B]`` float64 on the CPU; 0 for rows without tokens.
        highest: ``[B]`` float64 likewise.
        count: ``[B]`` float64, tokens that were compared, for diagnostics.
        total: ``[B]`` float64, sum over tokens.
        total_square: ``[B]`` float64, sum of squares.
        totals_are_exact: these two sums are of grid points, so that no order of terms can change them.
    """

    values: Tensor
    lowest: Tensor
    highest: Tensor
    count: Tensor
    total: Tensor
    total_square: Tensor
    totals_are_exact: bool


def entropy_shares(tokens: TokenWeights, table: ResponseTable, rule: ShareRule, reduction: Reduction) -> Shares:
    """Shares of all tokens of this rank.

    Args:
        tokens: of this rank.
        table: of the batch.
        rule: axis, mean, scope, floor, clip.
        reduction: sums over ranks: one ``exchange`` (two with a shaping mask), of split segments only.

    Returns:
        Shares of the dtype of the weights; a token alone in its comparison has share 1.

    Raises:
        DataError: a weight of 0 where its inverse or its log is needed and the floor is 0; on all ranks alike.
    """
    check_positive(table, rule)
    plan = plan_segments(table, spans_batch=rule.spans_batch, shares_one_value=rule.axis == "matrix")
    return _ShareWorker(tokens, table, plan, rule).run(reduction)


class _ShareWorker:
    """Two passes over the chunks: sums of incomplete segments, then shares."""

    def __init__(self, tokens: TokenWeights, table: ResponseTable, plan: SegmentPlan, rule: ShareRule) -> None:
        self.tokens, self.plan, self.rule = tokens, plan, rule
        self.device = tokens.values.device
        self.scratch = Scratch(self.device)
        self.order = plan.order.to(self.device)
        self.lists = length_lists(table, plan).to(self.device)
        self.scale = segment_scales(table, plan, rule)[table.mine][plan.order].to(self.device)[:, None]
        self.offset = self.scale * rule.floor + 1.0  # + 1: no token weighs nothing, an all-tiny column is uniform
        self.lengths = table.lengths[table.mine][plan.order].to(torch.float64).to(self.device)[:, None]
        self.positions = torch.arange(tokens.values.shape[1], dtype=torch.float64, device=self.device)
        self.plain = torch.empty(0)
        """Weights of the last chunk as they are, kept for geometric means, whose grid is one of logs."""
        self.total_magic = total_magic(tokens, table, plan, rule)
        self.sums: dict[int, Tensor] = {}
        self.counts: dict[int, Tensor] = {}
        budget = block_elements(tokens.values)
        sides = ([s for s in plan.segments if s.index % 2 == side] for side in (0, 1))
        self.parts = [(bool(side), chunk) for side, part in enumerate(sides) for chunk in chunks(part, budget)]

    def run(self, reduction: Reduction) -> Shares:
        """Both passes."""
        if self.rule.axis != "response":
            for is_correct, chunk in self.parts:
                if not chunk.is_complete:
                    self._add_up(chunk, is_correct)
            self._exchange(self.sums, reduction)
            if self.tokens.shaping_mask is not None:
                self._exchange(self.counts, reduction)
        return self._apply()

    def _grid(self, chunk: Chunk, is_correct: bool) -> tuple[Tensor, Tensor]:
        """Weights in steps of the grid, float64 (for geometric means their logs), and 1.0 where a token is compared."""
        scratch, width = self.scratch, chunk.width
        rows = self.order[chunk.first : chunk.last]
        shape = (len(rows), width)
        live = self._live(chunk, "live")
        values = self.tokens.values
        picked = torch.index_select(values[:, :width], 0, rows, out=scratch.take("picked", shape, values.dtype))
        if not self.tokens.padding_is_harmless or self.rule.smallest < LEAST_KNOWN_FLOOR:
            picked = torch.where(live > 0, picked, 1.0)  # 1 has an inverse, whatever the floor
        weights = scratch.copy("weights", picked, torch.float64)
        if self.rule.clip is not None or self.tokens.has_negatives:
            weights.clamp_(*self.rule.bounds)
        scale = self.scale[chunk.first : chunk.last]
        if self.rule.is_geometric:
            safe = torch.where(live > 0, weights.add_(self.rule.floor), 1.0)
            self.plain = safe if is_correct else safe.reciprocal()
            log = portable_log(safe).mul_(scale)
            weights.copy_(torch.round(log if is_correct else log.neg_()))
        elif is_correct:
            weights.mul_(scale).add_(self.offset[chunk.first : chunk.last])
        else:
            torch.div(scale, weights.add_(self.rule.floor), out=weights).add_(1.0)
        if self.tokens.shaping_mask is not None:
            live.mul_(self.tokens.shaping_mask[:, :width].index_select(0, rows))
        return weights.mul_(live), live

    def _live(self, chunk: Chunk, name: str) -> Tensor:
        """1.0 on response tokens: ``clamp(length - position, 0, 1)``, faster than converting the mask."""
        lengths = self.lengths[chunk.first : chunk.last]
        live = self.scratch.take(name, (len(lengths), chunk.width), torch.float64)
        return torch.sub(lengths, self.positions[: chunk.width], out=live).clamp_(0.0, 1.0)

    def _integers(self, grid: Tensor) -> Tensor:
        return self.scratch.copy("integers", grid, torch.int64)

    def _reduce(self, values: Tensor, chunk: Chunk) -> Tensor:
        """Sums over what the axis compares: ``[segments, width]``, ``[rows, 1]`` or ``[segments, 1]``."""
        if self.rule.axis == "response":
            return values.sum(1, keepdim=True)
        if self.rule.axis == "matrix":
            values = values.sum(1, keepdim=True)
        return chunk.by_segment(values).sum(1)

    def _counts_by_length(self, segments: Sequence[Segment], width: int) -> Tensor:
        """How many tokens of the whole batch each sum has, from lengths alone: ``[segments, width or 1]``."""
        lengths = self.lists[[s.index for s in segments]]
        if self.rule.axis == "matrix":
            return torch.where(lengths < NEVER, lengths, 0).sum(1, keepdim=True)
        return live_counts(lengths, width)

    def _add_up(self, chunk: Chunk, is_correct: bool) -> None:
        """First pass: sums of segments that other chunks or other ranks share."""
        grid, live = self._grid(chunk, is_correct)
        pairs = [(self.sums, grid)]
        if self.tokens.shaping_mask is not None:
            pairs.append((self.counts, live))
        for store, values in pairs:
            parts = self._reduce(self._integers(values), chunk)
            for segment, part in zip(chunk.segments, parts, strict=True):
                own = part[: segment.width]
                store[segment.index] = store[segment.index] + own if segment.index in store else own.clone()

    def _stored(self, store: dict[int, Tensor], chunk: Chunk) -> Tensor:
        """``[segments, width]`` int64 (one column for axis ``matrix``), 0 beyond a segment's own width."""
        if len(chunk.segments) == 1:
            return store[chunk.segments[0].index][None]
        width = 1 if self.rule.axis == "matrix" else chunk.width
        stacked = torch.zeros(len(chunk.segments), width, dtype=torch.int64, device=self.device)
        for row, segment in zip(stacked, chunk.segments, strict=True):
            sums = store[segment.index]
            row[: len(sums)] = sums
        return stacked

    def _exchange(self, store: dict[int, Tensor], reduction: Reduction) -> None:
        """Replaces this rank's sums of shared segments by those of the whole batch, where several ranks have tokens."""
        flat = torch.zeros(self.plan.num_shared, dtype=torch.int64, device=self.device)
        shared = [s for s in self.plan.segments if s.shared_width]
        for s in shared:
            part = store[s.index][: s.shared_width]
            flat[s.offset : s.offset + len(part)] = part
        flat = reduction.exchange(flat, self.plan.ranges)
        for s in shared:
            part = store[s.index][: s.shared_width]
            part.copy_(flat[s.offset : s.offset + len(part)])

    def _apply(self) -> Shares:
        """Second pass: shares, their extremes and their sums."""
        values = torch.empty_like(self.tokens.values)
        is_empty = torch.ones(len(values), dtype=torch.bool)
        is_empty[self.plan.order] = False
        values[is_empty.to(self.device)] = 0.0
        magic = self.total_magic
        facts = torch.zeros(5, len(self.order), dtype=torch.float64, device=self.device)
        ends = torch.zeros(2, len(self.order), dtype=values.dtype, device=self.device)
        for is_correct, chunk in self.parts:
            share, live = self._chunk_shares(chunk, is_correct)
            rows, part = self.order[chunk.first : chunk.last], slice(chunk.first, chunk.last)
            rounded = self.scratch.copy("rounded", share, values.dtype)
            values[:, : chunk.width].index_copy_(0, rows, rounded)
            values[:, chunk.width :].index_fill_(0, rows, 0.0)
            torch.amax(rounded, 1, out=ends[1, part])
            if self.rule.finds_lowest:
                torch.amin(rounded.masked_fill(self._live(chunk, "response") == 0, torch.inf), 1, out=ends[0, part])
            if self.tokens.shaping_mask is not None:
                share.mul_(live)
                torch.sum(live, 1, out=facts[2, part])
            square = torch.square(share, out=live)
            if magic is not None:
                share.add_(magic[0]).sub_(magic[0])
                square.add_(magic[1]).sub_(magic[1])
            torch.sum(share, 1, out=facts[3, part])
            torch.sum(square, 1, out=facts[4, part])
        facts[:2] = ends.to(torch.float64)
        by_row = torch.zeros(5, len(values), dtype=torch.float64)
        by_row[:, self.plan.order] = facts.cpu()
        lowest, highest, count, total, total_square = by_row.unbind()
        if self.tokens.shaping_mask is None:
            count[self.plan.order] = self.lengths[:, 0].cpu()
        return Shares(
            values=values,
            lowest=lowest,
            highest=highest,
            count=count,
            total=total,
            total_square=total_square,
            totals_are_exact=self.total_magic is not None,
        )

    def _chunk_shares(self, chunk: Chunk, is_correct: bool) -> tuple[Tensor, Tensor]:
        grid, live = self._grid(chunk, is_correct)
        if chunk.is_complete or self.rule.axis == "response":
            sums, counts = self._reduce(self._integers(grid), chunk), self._reduce(live, chunk)
        else:
            sums = self._stored(self.sums, chunk)
            has_counts = self.tokens.shaping_mask is not None
            counts = (
                self._stored(self.counts, chunk) if has_counts else self._counts_by_length(chunk.segments, chunk.width)
            )
        counts = counts.to(torch.float64).clamp(min=1)
        if self.rule.is_geometric:
            scale = self.scale[chunk.first : chunk.last]
            mean = sums.to(torch.float64) / counts
            inverse = portable_exp(-mean / self._scale_by_segment(scale, chunk))
            grid = self._apply_by_segment(torch.mul, self.plain.mul_(live), inverse, chunk)
        else:
            self._apply_by_segment(torch.mul, grid, counts.div_(sums.clamp(min=1)), chunk)
        if self.tokens.shaping_mask is not None:
            grid += self._live(chunk, "response") - live  # tokens that are not compared have share 1
        return grid, live

    def _scale_by_segment(self, scale: Tensor, chunk: Chunk) -> Tensor:
        """``[rows, 1]`` to one row a segment, whose rows have one scale; unchanged where each row has its own."""
        return scale if self.rule.axis == "response" else chunk.by_segment(scale)[:, 0]

    def _apply_by_segment(
        self, function: Callable[..., Tensor], values: Tensor, by_segment: Tensor, chunk: Chunk
    ) -> Tensor:
        """``function(values, by_segment)`` in place, each row with its segment's values (or its own, by response)."""
        if self.rule.axis == "response":
            return function(values, by_segment, out=values)
        cube = chunk.by_segment(values)
        function(cube, by_segment[:, None], out=cube)
        return values
