"""Segments: the responses of one set (O+ or O-) of one scope (a group, or the batch).

Entropies are compared within a segment. It may be held by one rank or by several. Only where several ranks hold tokens
at the same position must sums travel: ``shared_width`` positions, the second largest of the ranks' longest responses.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gtpo_megatron.algorithms.reduction import SharedRange
from gtpo_megatron.algorithms.table import ResponseTable

NEVER = torch.iinfo(torch.int64).max
"""Pads lists of lengths; greater than any position."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """This rank's view of a segment it holds rows of.

    Attributes:
        index: ``2 * scope + is_correct``.
        first: where its rows begin in the plan's ``order``.
        last: where they end.
        width: longest of them, tokens.
        offset: where its shared sums stand in the flat buffer.
        shared_width: positions that travel; 0 where no other rank holds any.
    """

    index: int
    first: int
    last: int
    width: int
    offset: int
    shared_width: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentPlan:
    """All segments of one rank.

    Attributes:
        segments: of wrong responses, then of correct ones; segments of equal numbers of rows side by side.
        order: ``[B]`` int64, local rows with tokens, as the segments have them.
        segment_of_row: ``[R]`` int64 over the whole batch; -1 for rows without tokens.
        counts: ``[num_segments]`` int64, responses of the whole batch in each segment.
        ranges: the flat buffer of shared sums: who holds which stretch.
    """

    segments: list[Segment]
    order: Tensor
    segment_of_row: Tensor
    counts: Tensor
    ranges: list[SharedRange]

    @property
    def num_shared(self) -> int:
        """Values in the flat buffer."""
        return sum(r.size for r in self.ranges)


def comparison_scope(table: ResponseTable, *, spans_batch: bool) -> Tensor:
    """``[R]`` int64: the group of every response, or one number for all of the batch."""
    return torch.zeros_like(table.group_index) if spans_batch else table.group_index


def plan_segments(table: ResponseTable, *, spans_batch: bool, shares_one_value: bool) -> SegmentPlan:
    """Finds segments, and which of their sums travel between which ranks.

    Args:
        table: of the batch.
        spans_batch: one scope instead of one a group.
        shares_one_value: a segment has one sum (axis ``matrix``) instead of one a position.
    """
    scope = comparison_scope(table, spans_batch=spans_batch)
    segment_of_row = torch.where(table.is_live, 2 * scope + table.is_correct, -1)
    num_segments = 2 * (1 if spans_batch else table.num_groups)
    live = table.is_live
    counts = torch.bincount(segment_of_row[live], minlength=num_segments)
    num_ranks = max(table.rank, int(table.owners.max()) if len(table.owners) else 0) + 1
    longest = torch.zeros(num_segments * num_ranks, dtype=torch.int64)
    cell = segment_of_row[live] * num_ranks + table.owners[live]
    longest.scatter_reduce_(0, cell, table.lengths[live], "amax")
    longest = longest.reshape(num_segments, num_ranks)

    mine = segment_of_row[table.mine]
    local, slot, sizes = torch.unique(mine[mine >= 0], return_inverse=True, return_counts=True)
    held = longest[local]
    widths = held[:, table.rank]
    shared_widths = held.topk(2, dim=1).values[:, 1] if num_ranks > 1 else torch.zeros_like(sizes)
    if shares_one_value:
        shared_widths = shared_widths.clamp(max=1)
    offsets, ranges = _lay_out(_members(held), shared_widths.tolist())
    segments, first = [], 0
    columns = zip(*(c.tolist() for c in (local, sizes, widths, shared_widths)), offsets, strict=True)
    alike = sorted(columns, key=lambda row: (row[0] % 2, row[3] > 0, row[1], row[2], row[0]))
    for index, size, width, shared_width, offset in alike:
        segments.append(
            Segment(index=index, first=first, last=first + size, width=width, offset=offset, shared_width=shared_width)
        )
        first += size
    place = torch.empty(len(local), dtype=torch.int64)
    place[torch.searchsorted(local, torch.tensor([s.index for s in segments], dtype=torch.int64))] = torch.arange(
        len(local)
    )
    order = torch.nonzero(mine >= 0).flatten()[torch.argsort(place[slot], stable=True)]
    return SegmentPlan(segments=segments, order=order, segment_of_row=segment_of_row, counts=counts, ranges=ranges)


def _members(held: Tensor) -> list[tuple[int, ...]]:
    """Ranks with tokens in each segment, ascending: ``[S, ranks]`` int64 lengths -> S tuples."""
    members: list[list[int]] = [[] for _ in range(len(held))]
    for segment, who in torch.nonzero(held).tolist():
        members[segment].append(who)
    return [tuple(who) for who in members]


def _lay_out(members: Sequence[tuple[int, ...]], widths: Sequence[int]) -> tuple[list[int], list[SharedRange]]:
    """Offsets that put segments of equal members side by side, so that one range serves them all."""
    offsets, ranges = [0] * len(members), []
    together: dict[tuple[int, ...], list[int]] = {}
    for i, (who, width) in enumerate(zip(members, widths, strict=True)):
        if width:
            together.setdefault(who, []).append(i)
    position = 0
    for who in sorted(together):
        start = position
        for i in together[who]:
            offsets[i] = position
            position += widths[i]
        ranges.append(SharedRange(members=who, size=position - start))
    return offsets, ranges


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Neighbouring rows of one side that are computed together, ``[S * rows, width]``.

    Attributes:
        segments: ``S`` whole segments of equal numbers of rows, or the one that the rows are a piece of.
        first: where the rows begin in the plan's ``order``.
        last: where they end.
        is_complete: all rows of the batch in these segments are here, so their sums can be taken from the chunk alone.
        width: longest row of the segments.
    """

    segments: list[Segment]
    first: int
    last: int
    is_complete: bool
    width: int

    def by_segment(self, values: Tensor) -> Tensor:
        """``[S * rows, W]`` -> ``[S, rows, W]``, a view."""
        return values.view(len(self.segments), -1, values.shape[1])


def chunks(segments: Sequence[Segment], budget: int) -> Iterator[Chunk]:
    """Cuts the segments of one side into chunks of about ``budget`` elements.

    Segments of equal numbers of rows go together, so that a sum over each is one reduction. A segment that other ranks
    share, or that is cut because it is much larger than the budget, is not complete.
    """
    alike: list[Segment] = []
    for segment in segments:
        rows = segment.last - segment.first
        if alike and (
            rows != alike[0].last - alike[0].first
            or (segment.shared_width > 0) != (alike[0].shared_width > 0)
            or (len(alike) + 1) * rows * max(segment.width, alike[-1].width) > budget
        ):
            yield from _cut(alike, budget)
            alike = []
        alike.append(segment)
    if alike:
        yield from _cut(alike, budget)


_LARGEST_WHOLE = 4
"""A segment up to this many budgets stays whole: cutting it would compute its weights twice."""


def _cut(alike: list[Segment], budget: int) -> Iterator[Chunk]:
    width = max(s.width for s in alike)
    first, last = alike[0].first, alike[-1].last
    is_shared = alike[0].shared_width > 0
    if (last - first) * width <= _LARGEST_WHOLE * budget:
        yield Chunk(segments=alike, first=first, last=last, is_complete=not is_shared, width=width)
        return
    rows_at_once = max(1, budget // width)  # so large a segment is alone
    for start in range(first, last, rows_at_once):
        stop = min(start + rows_at_once, last)
        yield Chunk(segments=alike, first=start, last=stop, is_complete=False, width=width)


def length_lists(table: ResponseTable, plan: SegmentPlan) -> Tensor:
    """The lengths of each segment's responses in the whole batch, ascending: ``[num_segments, longest list]`` int64."""
    live = torch.nonzero(plan.segment_of_row >= 0).flatten()
    order = live[torch.argsort(table.lengths[live], stable=True)]
    order = order[torch.argsort(plan.segment_of_row[order], stable=True)]
    starts = torch.cumsum(plan.counts, 0) - plan.counts
    column = torch.arange(len(order)) - starts[plan.segment_of_row[order]]
    lists = torch.full((len(plan.counts), int(plan.counts.max()) if len(plan.counts) else 0), NEVER)
    lists[plan.segment_of_row[order], column] = table.lengths[order]
    return lists


def live_counts(lists: Tensor, width: int) -> Tensor:
    """``d_t`` or ``h_t``: how many responses of a segment are longer than ``t``, for ``t`` in [0, width).

    Args:
        lists: ``[S, G]`` int64, rows of ``length_lists``.
        width: positions.

    Returns:
        ``[S, width]`` int64.
    """
    sizes = (lists < NEVER).sum(1, keepdim=True)
    positions = torch.arange(width, device=lists.device).expand(len(lists), width).contiguous()
    return sizes - torch.searchsorted(lists.contiguous(), positions, right=True)
