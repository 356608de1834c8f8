"""Entropy relative to other responses: the ``x`` and ``y`` of GTPO, the ``X`` and ``Y`` of GRPO-S.

Arithmetic: ``x[i,t] = H[i,t] / sum_{k in O+} H[k,t] * d_t`` and ``y[j,t] = (1/H[j,t]) / sum_{k in O-} (1/H[k,t]) *
h_t`` [S 2, 13; I 3, 4]; geometric: ``x = H / (prod_{live O+} H)^(1/d_t)`` [I App. C]. The axis ``response`` compares with the
response's own other tokens, ``matrix`` with all tokens of the set [S sec. 5]. ``H`` stands for ``clamp(H) + floor``.

Exactness: every weight is truncated to a grid that its segment's largest weight and number of terms fix (``2 ** -62``
    of
their product), and shares are made of the truncated weights: sums are exact in any order and ``sum x = d_t`` holds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gtpo_megatron.algorithms.fixed_point import grid_scale
from gtpo_megatron.algorithms.portable_math import portable_exp, portable_log
from gtpo_megatron.algorithms.reduction import Reduction
from gtpo_megatron.algorithms.rows import block_elements
from gtpo_megatron.algorithms.segments import (
    Chunk,
    Segment,
    SegmentPlan,
    chunks,
    length_lists,
    live_counts,
    plan_segments,
)
from gtpo_megatron.algorithms.table import ResponseTable
from gtpo_megatron.errors import DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class ShareRule:
    """How weights are compared.

    Attributes:
        axis: ``position``, ``response`` or ``matrix``.
        is_geometric: compare with the geometric mean.
        spans_batch: compare over the batch instead of the group.
        floor: added to every weight.
        clip: weights are clamped to it first.
    """

    axis: Literal["position", "response", "matrix"] = "position"
    is_geometric: bool = False
    spans_batch: bool = False
    floor: float = 1e-8
    clip: tuple[float, float] | None = None

    @property
    def bounds(self) -> tuple[float, float]:
        """Interval that weights are clamped to; slightly negative ones become 0."""
        return self.clip or (0.0, torch.finfo(torch.float64).max)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenWeights:
    """What this rank's tokens are weighed by.

    Attributes:
        values: ``[B, T]`` float32 or float64: entropies, or what stands in their place; nats; no gradient flows.
        response_mask: ``[B, T]`` bool, left-aligned.
        shaping_mask: ``[B, T]`` bool; tokens where it is False have share 1 and enter no sum and no count. None: all.
        padding_is_finite: ``values`` outside the mask can be multiplied by 0; otherwise they are cleared first.
    """

    values: Tensor
    response_mask: Tensor
    shaping_mask: Tensor | None = None
    padding_is_finite: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """Shares of this rank's tokens.

    Attributes:
        values: ``[B, T]``, zero outside the mask.
        lowest: ``[B]`` float64 on the CPU; 0 for rows without tokens.
        highest: ``[B]`` float64 likewise.
        count: ``[B]`` float64, tokens that were compared, for diagnostics.
        total: ``[B]`` float64, sum over tokens, for diagnostics.
        total_square: ``[B]`` float64, sum of squares, for diagnostics.
    """

    values: Tensor
    lowest: Tensor
    highest: Tensor
    count: Tensor
    total: Tensor
    total_square: Tensor


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
    _check_positive(table, rule)
    plan = plan_segments(table, spans_batch=rule.spans_batch, shares_one_value=rule.axis == "matrix")
    worker = _ShareWorker(tokens, table, plan, rule)
    for is_correct in (False, True):
        side = [s for s in plan.segments if s.index % 2 == is_correct]
        parts = list(chunks(side, block_elements(tokens.values)))
        worker.parts.append((is_correct, parts))
    worker.sum_incomplete(reduction)
    return worker.apply()


def _check_positive(table: ResponseTable, rule: ShareRule) -> None:
    if rule.bounds[0] + rule.floor > 0:
        return
    needs_inverse = table.is_live if rule.is_geometric else table.is_live & ~table.is_correct
    is_zero = needs_inverse & (table.lowest <= 0)
    if bool(is_zero.any()):
        row = int(torch.nonzero(is_zero)[0])
        raise DataError(
            f"token_entropy of response {row} of the batch contains {float(table.lowest[row])} and entropy_floor=0: "
            "its inverse or logarithm does not exist; set entropy_floor above 0"
        )


class _ShareWorker:
    """Two passes over the chunks: sums of incomplete segments, then shares."""

    def __init__(self, tokens: TokenWeights, table: ResponseTable, plan: SegmentPlan, rule: ShareRule) -> None:
        self.weights, self.response_mask, self.shaping_mask = tokens.values, tokens.response_mask, tokens.shaping_mask
        self.table, self.plan, self.rule, self.padding_is_finite = table, plan, rule, tokens.padding_is_finite
        self.device = tokens.values.device
        self.parts: list[tuple[bool, list[Chunk]]] = []
        self.sums: dict[int, Tensor] = {}
        self.counts: dict[int, Tensor] = {}
        self.lists = length_lists(table, plan).to(self.device)
        self.row_scale = self._scales()[table.mine].to(self.device)

    def _scales(self) -> Tensor:
        """``[R]`` float64, the power of two that puts each row's weights on its segment's grid."""
        table, rule = self.table, self.rule
        low, high = rule.bounds
        smallest = table.lowest.clamp(low, high) + rule.floor
        largest = table.highest.clamp(low, high) + rule.floor
        bound = torch.where(table.is_correct, largest, 1.0 / smallest)
        if rule.is_geometric:
            bound = torch.maximum(portable_log(smallest).abs(), portable_log(largest).abs())
        if rule.axis == "response":
            return grid_scale(bound * table.lengths)
        live = self.plan.segment_of_row >= 0
        segment = self.plan.segment_of_row.clamp(min=0)
        num_segments = len(self.plan.counts)
        peak = torch.zeros(num_segments, dtype=torch.float64)
        peak.scatter_reduce_(0, segment[live], bound[live], "amax")
        terms = self.plan.counts
        if rule.axis == "matrix":
            terms = torch.zeros(num_segments, dtype=torch.int64).index_add_(0, segment[live], table.lengths[live])
        return grid_scale(peak * terms)[segment] if num_segments else bound

    def _grid_weights(self, chunk: Chunk, is_correct: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Grid points (float64 integers), the weights they stand for, and the bool mask of tokens in the comparison."""
        rows = torch.tensor(chunk.rows, device=self.device)
        low, high = self.rule.bounds
        live = self.response_mask[:, : chunk.width].index_select(0, rows)
        weights = self.weights[:, : chunk.width].index_select(0, rows)
        if not self.padding_is_finite:
            weights = torch.where(live, weights, 0.0)
        weights = weights.to(torch.float64).clamp_(low, high).add_(self.rule.floor)
        if not is_correct:
            weights = weights.reciprocal_()
        scale = self.row_scale[rows][:, None]
        if self.rule.is_geometric:
            weights = torch.where(live, weights, 1.0)
            grid = torch.round(portable_log(weights) * scale)
        else:
            grid = weights.mul_(scale).add_(1.0).trunc_()  # +1: no token weighs nothing, an all-tiny column is uniform
        if self.shaping_mask is not None:
            live = live & self.shaping_mask[:, : chunk.width].index_select(0, rows)
        grid.mul_(live.to(torch.float64))
        return grid, weights, live

    def _reduce(self, values: Tensor, chunk: Chunk) -> Tensor:
        """Sums of integers over what the axis compares: ``[segments, width]``, ``[rows, 1]`` or ``[segments, 1]``."""
        if self.rule.axis == "response":
            return values.sum(1, keepdim=True)
        if self.rule.axis == "matrix":
            values = values.sum(1, keepdim=True)
        if len(chunk.segments) == 1:
            return values.sum(0, keepdim=True)
        slots = torch.tensor(chunk.slots, device=self.device)
        return values.new_zeros(len(chunk.segments), values.shape[1]).index_add_(0, slots, values)

    def _count(self, chunk: Chunk, live: Tensor) -> Tensor:
        """How many tokens each sum of a complete chunk has; from lengths alone unless a shaping mask is given."""
        if self.rule.axis == "response" or self.shaping_mask is not None:
            return self._reduce(live.to(torch.int64), chunk)
        return self._count_by_length(chunk.segments, chunk.width)

    def _count_by_length(self, segments: Sequence[Segment], width: int) -> Tensor:
        lists = self.lists[[s.index for s in segments]]
        if self.rule.axis == "matrix":
            return torch.where(lists < torch.iinfo(torch.int64).max, lists, 0).sum(1, keepdim=True)
        return live_counts(lists, width)

    def sum_incomplete(self, reduction: Reduction) -> None:
        """First pass: sums of segments that other chunks or other ranks share."""
        if self.rule.axis == "response":
            return
        for is_correct, parts in self.parts:
            for chunk in parts:
                if chunk.is_complete:
                    continue
                grid, _, live = self._grid_weights(chunk, is_correct)
                index = chunk.segments[0].index
                self._add(self.sums, index, self._reduce(grid.to(torch.int64), chunk)[0])
                if self.shaping_mask is not None:
                    self._add(self.counts, index, self._reduce(live.to(torch.int64), chunk)[0])
        self._exchange(self.sums, reduction)
        if self.shaping_mask is not None:
            self._exchange(self.counts, reduction)

    @staticmethod
    def _add(store: dict[int, Tensor], index: int, values: Tensor) -> None:
        store[index] = store[index] + values if index in store else values

    def _exchange(self, store: dict[int, Tensor], reduction: Reduction) -> None:
        flat = torch.zeros(self.plan.num_shared, dtype=torch.int64, device=self.device)
        shared = [s for s in self.plan.segments if s.shared_width]
        for s in shared:
            part = store[s.index][: s.shared_width]
            flat[s.offset : s.offset + len(part)] = part
        flat = reduction.exchange(flat, self.plan.ranges)
        for s in shared:
            part = store[s.index][: s.shared_width]
            part.copy_(flat[s.offset : s.offset + len(part)])

    def apply(self) -> Shares:
        """Second pass: shares, their extremes and their sums."""
        values = torch.zeros_like(self.weights)
        facts = torch.zeros(4, len(values), dtype=torch.float64, device=self.device)
        for is_correct, parts in self.parts:
            for chunk in parts:
                share, live = self._chunk_shares(chunk, is_correct)
                rows = torch.tensor(chunk.rows, device=self.device)
                rounded = share.to(values.dtype)
                values[:, : chunk.width].index_copy_(0, rows, rounded)
                highest = torch.finfo(values.dtype).max
                facts[0, rows] = torch.where(live, rounded, highest).amin(1).to(torch.float64)
                facts[1, rows] = rounded.amax(1).to(torch.float64)
                facts[2, rows] = share.sum(1)
                facts[3, rows] = share.square_().sum(1)
        lowest, highest_share, total, total_square = facts.cpu().unbind()
        return Shares(
            values=values,
            lowest=lowest,
            highest=highest_share,
            count=self.table.lengths[self.table.mine].to(torch.float64),
            total=total,
            total_square=total_square,
        )

    def _chunk_shares(self, chunk: Chunk, is_correct: bool) -> tuple[Tensor, Tensor]:
        grid, weights, live = self._grid_weights(chunk, is_correct)
        if chunk.is_complete or self.rule.axis == "response":
            sums, counts = self._reduce(grid.to(torch.int64), chunk), self._count(chunk, live)
        else:
            segment = chunk.segments[0]
            sums = self.sums[segment.index][None]
            counts = (
                self.counts[segment.index][None]
                if self.shaping_mask is not None
                else self._count_by_length([segment], chunk.width)
            )
        counts = counts.clamp(min=1).to(torch.float64)
        if self.rule.is_geometric:
            grid = weights
            factors = portable_exp(-(sums.to(torch.float64) / (counts * self._sum_scale(chunk))))
        else:
            factors = counts / sums.clamp(min=1).to(torch.float64)
        share = grid.mul_(self._spread(factors, chunk))
        response = live
        if self.shaping_mask is not None or self.rule.is_geometric:
            rows = torch.tensor(chunk.rows, device=self.device)
            response = self.response_mask[:, : chunk.width].index_select(0, rows)
            share = torch.where(live, share, response.to(torch.float64))
        return share, response

    def _sum_scale(self, chunk: Chunk) -> Tensor:
        """Grid scale of each row of ``_reduce``'s result."""
        scale = self.row_scale[torch.tensor(chunk.rows, device=self.device)]
        if self.rule.axis == "response":
            return scale[:, None]
        first_rows = [chunk.slots.index(slot) for slot in range(len(chunk.segments))]
        return scale[first_rows][:, None]

    def _spread(self, factors: Tensor, chunk: Chunk) -> Tensor:
        """Factors of segments to factors of rows."""
        if self.rule.axis == "response" or len(chunk.segments) == 1:
            return factors
        return factors.index_select(0, torch.tensor(chunk.slots, device=self.device))
