"""Entropy relative to other responses: the ``x`` and ``y`` of GTPO, the ``X`` and ``Y`` of GRPO-S.

Arithmetic: ``x[i,t] = H[i,t] / sum_{k in O+} H[k,t] * d_t`` [S 2; I 3] and ``y[j,t] = (1/H[j,t]) / sum_{k in O-}
(1/H[k,t]) * h_t`` [S 13; I 4]; geometric: ``x = H / (prod_{live O+} H)^(1/d_t)`` [I App. C]. The axis ``response``
compares with the response's own other tokens, ``matrix`` with all tokens of the set [S sec. 5]. ``H`` stands for
``clamp(H) + floor``.

Exactness: sums are of integers, so no order of terms and no dealing changes a bit. What a weight is rounded to:

- axis ``position``, where ``share_grid.fixed_scales`` finds one grid for all positions of a segment (the common case):
  that grid. Shares are made of the rounded weights, so ``sum x = d_t`` holds to float64 rounding; a weight is off by
  ``2 ** -26`` of itself at most, and by ``2 ** -50`` where it is of the order of the largest.
- axis ``position`` otherwise: a grid for each position, from the largest weight there; with ``k`` responses in the
  largest segment, the sum is off by ``k 2 ** -51`` of itself at most (``k^2 2 ** -62`` beyond 2,048; ``2 ** -47`` for
  16), and shares likewise, whatever the floor and the range. Where a segment is split, the largest weights travel
  before the sums do.
- axes ``response`` and ``matrix``: a grid for each row, from its largest weight, with the same bound for the tokens of
  the longest response (``2 ** -38`` for 4,096); for ``matrix`` the rows' sums are then added like one position.
- geometric: a grid of logs; the mean of the logs is off by ``2 ** -51`` times the number of terms at most.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gtpo_megatron.algorithms.fixed_point import grid_unit, integer_sums
from gtpo_megatron.algorithms.portable_math import portable_exp, portable_log
from gtpo_megatron.algorithms.reduction import Reduction
from gtpo_megatron.algorithms.row_sums import row_sums, sums_and_squares
from gtpo_megatron.algorithms.rows import block_elements
from gtpo_megatron.algorithms.scratch import Scratch, lazy_zeros
from gtpo_megatron.algorithms.segments import (
    NEVER,
    Chunk,
    SegmentPlan,
    chunks,
    length_lists,
    live_counts,
    plan_segments,
)
from gtpo_megatron.algorithms.share_grid import LEAST_WEIGHT, ShareRule, TokenWeights, check_weights, fixed_scales
from gtpo_megatron.algorithms.table import ResponseTable


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """Shares ``x`` of this rank's tokens, as ``x - origin``, and a few numbers of each row, ``[B]`` float64 on the CPU.

    Sums are of deviations on a grid of the row's own, so that no order of terms changes a bit of them (``row_sums``).

    Attributes:
        values: ``[B, T]``, ``x - origin``; 0 outside the mask.
        lowest: no share of the row is below it; 0 where ``ShareRule.may_be_narrow`` is False.
        highest: no share of the row is above it.
        origin: 1, so that shares close to it keep their digits in float32; 0 where pools are wide.
        count: tokens that were compared, for diagnostics.
        total: sum of the deviations; tokens that were not compared have none.
        total_square: sum of their squares.
    """

    values: Tensor
    lowest: Tensor
    highest: Tensor
    origin: Tensor
    count: Tensor
    total: Tensor
    total_square: Tensor


def entropy_shares(tokens: TokenWeights, table: ResponseTable, rule: ShareRule, reduction: Reduction) -> Shares:
    """Shares of all tokens of this rank.

    Args:
        tokens: of this rank.
        table: of the batch.
        rule: axis, mean, scope, floor, clip.
        reduction: totals over ranks: one ``exchange`` of split segments, one more of their largest weights where no
            fixed grid serves, one more of counts with a shaping mask.

    Returns:
        Shares of the dtype of the weights; a token alone in its comparison has share 1.

    Raises:
        DataError: a weight of 0 where its inverse or its log is needed and the floor is 0; on all ranks alike.
    """
    check_weights(table, rule, tokens.name)
    plan = plan_segments(table, spans_batch=rule.spans_batch, shares_one_value=rule.axis == "matrix")
    return _ShareWorker(tokens, table, plan, rule).run(reduction)


class _ShareWorker:
    """Passes over the chunks: largest weights and sums of incomplete segments, then shares."""

    def __init__(self, tokens: TokenWeights, table: ResponseTable, plan: SegmentPlan, rule: ShareRule) -> None:
        self.tokens, self.plan, self.rule = tokens, plan, rule
        self.device = tokens.values.device
        self.scratch = Scratch(self.device)
        self.order = plan.order.to(self.device)
        self.lists = length_lists(table, plan).to(self.device)
        mine = table.mine[plan.order]
        scale = fixed_scales(table, plan, rule)
        self.scale = None if scale is None else scale[mine].to(self.device)[:, None]
        """Of each row, in the plan's order; None: grids follow the weights."""
        self.longest = int(table.lengths.max()) if len(table.lengths) else 0
        self.most_responses = int(plan.counts.max()) if len(plan.counts) else 0
        self.lengths = table.lengths[mine].to(torch.float64).to(self.device)[:, None]
        self.positions = torch.arange(tokens.values.shape[1], dtype=torch.float64, device=self.device)
        self.plain = torch.empty(0)
        """Weights of the last chunk as they are, kept for geometric means, whose grid is one of logs."""
        self.sums_deviations = rule.may_be_narrow or tokens.shaping_mask is not None
        self.row_sums: dict[int, Tensor] = {}
        self.peaks: dict[int, Tensor] = {}
        self.sums: dict[int, Tensor] = {}
        self.counts: dict[int, Tensor] = {}
        budget = block_elements(tokens.values)
        sides = ([s for s in plan.segments if s.index % 2 == side] for side in (0, 1))
        self.parts = [(bool(side), chunk) for side, part in enumerate(sides) for chunk in chunks(part, budget)]

    def run(self, reduction: Reduction) -> Shares:
        """All passes."""
        if self.rule.axis != "response":
            incomplete = [(is_correct, chunk) for is_correct, chunk in self.parts if not chunk.is_complete]
            if self.scale is None:
                for is_correct, chunk in incomplete:
                    self._find_peaks(chunk, is_correct)
                self._exchange(self.peaks, reduction, keeps_largest=True)
            for is_correct, chunk in incomplete:
                self._add_up(chunk, is_correct)
            self._exchange(self.sums, reduction)
            if self.tokens.shaping_mask is not None:
                self._exchange(self.counts, reduction)
        return self._apply()

    # --------------------------------------------------------------------------------------------- weights of a chunk
    def _weights(self, chunk: Chunk, is_correct: bool) -> tuple[Tensor, Tensor]:
        """Weights ``[rows, width]`` float64, and 1.0 where a token is compared; both 0 elsewhere.

        They are integers in steps of the fixed grid where there is one (of logs, for geometric means).
        """
        scratch, width = self.scratch, chunk.width
        rows = self.order[chunk.first : chunk.last]
        shape = (len(rows), width)
        live = self._live(chunk, "live")
        values = self.tokens.values
        picked = torch.index_select(values[:, :width], 0, rows, out=scratch.take("picked", shape, values.dtype))
        if not self.tokens.padding_is_harmless or self.rule.smallest < LEAST_WEIGHT:
            picked = torch.where(live > 0, picked, 1.0)  # 1 has an inverse, whatever the floor
        weights = scratch.copy("weights", picked, torch.float64)
        if self.rule.clip is not None or self.tokens.has_negatives:
            weights.clamp_(*self.rule.bounds)
        self._raise_and_scale(weights, chunk, is_correct)
        if self.tokens.shaping_mask is not None:
            live.mul_(self.tokens.shaping_mask[:, :width].index_select(0, rows))
        return weights.mul_(live), live

    def _raise_and_scale(self, weights: Tensor, chunk: Chunk, is_correct: bool) -> None:
        """``H -> H + floor`` or its inverse, on the fixed grid if there is one; in place."""
        raised_by = self.rule.raised_by
        scale = None if self.scale is None else self.scale[chunk.first : chunk.last]
        if self.rule.is_geometric and scale is not None:
            weights.add_(raised_by)
            self.plain = self.scratch.copy("plain", weights, torch.float64)
            if not is_correct:
                self.plain.reciprocal_()
            log = portable_log(weights).mul_(scale)
            torch.round(log if is_correct else log.neg_(), out=weights)
        elif scale is None:
            weights.add_(raised_by)
            if not is_correct:
                weights.reciprocal_()
        elif is_correct:
            weights.mul_(scale).add_(scale * raised_by).round_()
        else:
            torch.div(scale, weights.add_(raised_by), out=weights).round_()

    def _live(self, chunk: Chunk, name: str) -> Tensor:
        """1.0 on response tokens: ``clamp(length - position, 0, 1)``, faster than converting the mask."""
        lengths = self.lengths[chunk.first : chunk.last]
        live = self.scratch.take(name, (len(lengths), chunk.width), torch.float64)
        return torch.sub(lengths, self.positions[: chunk.width], out=live).clamp_(0.0, 1.0)

    # ------------------------------------------------------------------------------------------------------ exact sums
    def _terms(self, weights: Tensor) -> Tensor:
        """What is added up over the rows of a segment: weights, or their sums over each row, ``[rows, 1]``."""
        if self.rule.axis == "position":
            return weights
        if self.scale is not None:
            return self.scratch.copy("integers", weights, torch.int64).sum(1, keepdim=True)
        spare = self.scratch.take("spare", tuple(weights.shape), torch.float64)
        return row_sums(weights, weights.amax(1), self.longest, out=spare)[:, None]

    def _segment_unit(self, peaks: Tensor) -> Tensor:
        """Grid ``[segments, width or 1]`` of sums whose largest terms are ``peaks``."""
        return grid_unit(peaks, self.most_responses)

    def _segment_sums(self, terms: Tensor, chunk: Chunk, unit: Tensor | None) -> Tensor:
        """int64 ``[segments, width or 1]``."""
        if unit is None:
            return chunk.by_segment(self.scratch.copy("integers", terms, torch.int64)).sum(1)
        cube = chunk.by_segment(terms)
        spare = self.scratch.take("spare", tuple(cube.shape), torch.float64)
        return integer_sums(cube, unit[:, None], 1, out=spare)

    def _find_peaks(self, chunk: Chunk, is_correct: bool) -> None:
        """Largest terms of segments that other chunks or other ranks share; as integers, which have the same order."""
        weights, _ = self._weights(chunk, is_correct)
        terms = self._terms(weights)
        if self.rule.axis == "matrix":
            self.row_sums[chunk.first] = terms
        peaks = chunk.by_segment(terms).amax(1).view(torch.int64)
        self._keep(self.peaks, peaks, chunk, torch.maximum)

    def _add_up(self, chunk: Chunk, is_correct: bool) -> None:
        """Sums of the same."""
        terms, live = self.row_sums.get(chunk.first), None
        if terms is None or self.tokens.shaping_mask is not None:
            weights, live = self._weights(chunk, is_correct)
            terms = self._terms(weights) if terms is None else terms
        unit = self._segment_unit(self._stored(self.peaks, chunk).view(torch.float64)) if self.scale is None else None
        self._keep(self.sums, self._segment_sums(terms, chunk, unit), chunk, torch.add)
        if self.tokens.shaping_mask is not None and live is not None:
            compared = live if self.rule.axis == "position" else live.sum(1, keepdim=True)
            self._keep(self.counts, self._segment_sums(compared, chunk, None), chunk, torch.add)

    def _keep(
        self, store: dict[int, Tensor], parts: Tensor, chunk: Chunk, combine: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        for segment, part in zip(chunk.segments, parts, strict=True):
            own = part[: segment.width]
            store[segment.index] = combine(store[segment.index], own) if segment.index in store else own.clone()

    def _stored(self, store: dict[int, Tensor], chunk: Chunk) -> Tensor:
        """``[segments, width]`` int64 (one column for axis ``matrix``), 0 beyond a segment's own width."""
        if len(chunk.segments) == 1:
            return store[chunk.segments[0].index][None]
        width = 1 if self.rule.axis == "matrix" else chunk.width
        stacked = torch.zeros(len(chunk.segments), width, dtype=torch.int64, device=self.device)
        for row, segment in zip(stacked, chunk.segments, strict=True):
            kept = store[segment.index]
            row[: len(kept)] = kept
        return stacked

    def _exchange(self, store: dict[int, Tensor], reduction: Reduction, *, keeps_largest: bool = False) -> None:
        """Replaces this rank's numbers of shared segments by those of the whole batch, where several have tokens."""
        flat = torch.zeros(self.plan.num_shared, dtype=torch.int64, device=self.device)
        shared = [s for s in self.plan.segments if s.shared_width]
        for s in shared:
            part = store[s.index][: s.shared_width]
            flat[s.offset : s.offset + len(part)] = part
        flat = reduction.exchange(flat, self.plan.ranges, keeps_largest=keeps_largest)
        for s in shared:
            part = store[s.index][: s.shared_width]
            part.copy_(flat[s.offset : s.offset + len(part)])

    # ---------------------------------------------------------------------------------------------------------- shares
    def _apply(self) -> Shares:
        """Last pass: shares, their extremes and their sums."""
        own = self.tokens.values
        values = lazy_zeros(own.shape, own.dtype, own.device)
        facts = torch.zeros(5, len(self.order), dtype=torch.float64, device=self.device)
        for is_correct, chunk in self.parts:
            share, live = self._chunk_shares(chunk, is_correct)
            rows, part = self.order[chunk.first : chunk.last], slice(chunk.first, chunk.last)
            if self.tokens.shaping_mask is not None:
                torch.sum(live, 1, out=facts[2, part])
                others = self._live(chunk, "response").sub_(live)
                share.add_(others)  # tokens that are not compared have share 1
                live = others.add_(live)
            if self.sums_deviations:
                share.sub_(live)
                torch.amin(share, 1, out=facts[0, part])
                torch.amax(share, 1, out=facts[1, part])
            rounded = self.scratch.copy("rounded", share, values.dtype)
            values[:, : chunk.width].index_copy_(0, rows, rounded)
            if not self.sums_deviations:
                facts[1, part] = rounded.amax(1).to(torch.float64)
            bound = torch.maximum(facts[1, part], -facts[0, part])
            sums_and_squares(share, bound, self.longest, squares=live, out=facts[3:, part])
        by_row = torch.zeros(5, len(values), dtype=torch.float64)
        by_row[:, self.plan.order] = facts.cpu()
        lowest, highest, count, total, total_square = by_row.unbind()
        if self.tokens.shaping_mask is None:
            count[self.plan.order] = self.lengths[:, 0].cpu()
        origin = torch.full_like(count, float(self.sums_deviations))
        if self.sums_deviations:  # padding, and so 1, lies between the two whatever the padded length
            lowest, highest = origin + lowest.clamp(max=0.0), origin + highest.clamp(min=0.0)
        return Shares(
            values=values,
            lowest=lowest,
            highest=highest,
            origin=origin,
            count=count,
            total=total,
            total_square=total_square,
        )

    def _chunk_shares(self, chunk: Chunk, is_correct: bool) -> tuple[Tensor, Tensor]:
        """Shares ``[rows, width]`` float64 of compared tokens, and 1.0 where a token is compared; 0 elsewhere."""
        weights, live = self._weights(chunk, is_correct)
        totals = self._totals(weights, chunk)
        counts = self._counts(live, chunk).to(torch.float64).clamp_(min=1)
        if self.rule.is_geometric:
            factor = portable_exp(-totals / counts)
            weights = self.plain.mul_(live)
        else:
            factor = counts.div_(totals)
        if self.rule.axis == "response":
            return weights.mul_(factor), live
        cube = chunk.by_segment(weights)
        torch.mul(cube, factor[:, None], out=cube)
        return weights, live

    def _totals(self, weights: Tensor, chunk: Chunk) -> Tensor:
        """What a share is relative to, in the unit of the weights: ``[segments, width]``, or ``[rows or segments, 1]``.

        For geometric means the sum of the logs. At least the smallest step of the grid elsewhere, where all is padding.
        """
        fixed = None if self.scale is None else self.scale[chunk.first : chunk.last]
        if self.rule.axis == "response":
            sums = self._terms(weights).to(torch.float64)
            return sums.div_(fixed) if fixed is not None else sums.clamp_(min=LEAST_WEIGHT)
        unit = None
        if chunk.is_complete:
            terms = self._terms(weights)
            unit = self._segment_unit(chunk.by_segment(terms).amax(1)) if fixed is None else None
            sums = self._segment_sums(terms, chunk, unit)
        else:
            if fixed is None:
                unit = self._segment_unit(self._stored(self.peaks, chunk).view(torch.float64))
            sums = self._stored(self.sums, chunk)
        if self.rule.is_geometric and fixed is not None:
            return sums.to(torch.float64).div_(chunk.by_segment(fixed)[:, 0])
        totals = sums.clamp(min=1).to(torch.float64)
        return totals if unit is None else totals.mul_(unit)

    def _counts(self, live: Tensor, chunk: Chunk) -> Tensor:
        """How many tokens each total has."""
        if self.rule.axis == "response":
            return live.sum(1, keepdim=True)
        if chunk.is_complete:
            return chunk.by_segment(live if self.rule.axis == "position" else live.sum(1, keepdim=True)).sum(1)
        if self.tokens.shaping_mask is not None:
            return self._stored(self.counts, chunk)
        lengths = self.lists[[s.index for s in chunk.segments]]
        if self.rule.axis == "matrix":
            return torch.where(lengths < NEVER, lengths, 0).sum(1, keepdim=True)
        return live_counts(lengths, chunk.width)
