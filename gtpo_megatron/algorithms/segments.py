"""Segments: the responses of one set (O+ or O-) of one scope (a group, or the batch).

Entropies are compared within a segment. It may be held by one rank or by several. Only where several ranks hold tokens at the same position must sums
travel: ``shared_width`` positions, the second largest of the ranks' longest responses.
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
        rows: local row numbers, ascending.
        width: longest of them, tokens.
        offset: where its shared sums stand in the flat buffer.
        shared_width: positions that travel; 0 where no other rank holds any.
    """

    index: int
    rows: list[int]
    width: int
    offset: int
    shared_width: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentPlan:
    """All segments of one rank.

    Attributes:
        segments: ordered by index.
        segment_of_row: ``[R]`` int64 over the whole batch; -1 for rows without tokens.
        counts: ``[num_segments]`` int64, responses of the whole batch in each segment.
        ranges: the flat buffer of shared sums: who holds which stretch.
    """

    segments: list[Segment]
    segment_of_row: Tensor
    counts: Tensor
    ranges: list[SharedRange]

    @property
    def num_shared(self) -> int:
        """Values in the flat buffer."""
        return sum(r.size for r in self.ranges)


def plan_segments(table: ResponseTable, *, spans_batch: bool, shares_one_value: bool) -> SegmentPlan:
    """Finds segments, and which of their sums travel between which ranks.

    Args:
        table: of the batch.
        spans_batch: one scope instead of one a group.
        shares_one_value: a segment has one sum (axis ``matrix``) instead of one a position.
    """
    scope = torch.zeros_like(table.group_index) if spans_batch else table.group_index
    segment_of_row = torch.where(table.is_live, 2 * scope + table.is_correct, -1)
    num_segments = 2 * (1 if spans_batch else table.num_groups)
    live = table.is_live
    counts = torch.bincount(segment_of_row[live], minlength=num_segments)
    num_ranks = int(table.owners.max()) + 1 if len(table.owners) else 1
    longest = torch.zeros(num_segments * num_ranks, dtype=torch.int64)
    cell = segment_of_row[live] * num_ranks + table.owners[live]
    longest.scatter_reduce_(0, cell, table.lengths[live], "amax")
    longest = longest.reshape(num_segments, num_ranks)

    by_segment: dict[int, list[int]] = {}
    for row, segment in enumerate(segment_of_row[table.mine].tolist()):
        if segment >= 0:
            by_segment.setdefault(segment, []).append(row)
    local = sorted(by_segment)
    held = longest[local]
    shared_widths = held.topk(2, dim=1).values[:, 1] if num_ranks > 1 else torch.zeros(len(local), dtype=torch.int64)
    if shares_one_value:
        shared_widths = shared_widths.clamp(max=1)
    members = [tuple(torch.nonzero(row).flatten().tolist()) for row in held > 0]
    offsets, ranges = _lay_out(members, shared_widths.tolist())
    segments = [
        Segment(
            index=index,
            rows=by_segment[index],
            width=int(held[i, table.rank]),
            offset=offsets[i],
            shared_width=int(shared_widths[i]),
        )
        for i, index in enumerate(local)
    ]
    return SegmentPlan(segments=segments, segment_of_row=segment_of_row, counts=counts, ranges=ranges)


def _lay_out(members: Sequence[tuple[int, ...]], widths: Sequence[int]) -> tuple[list[int], list[SharedRange]]:
    """Offsets that put segments of equal members side by side, so that one range serves them all."""
    offsets, ranges = [0] * len(members), []
    position = 0
    for who in sorted({m for m, width in zip(members, widths, strict=True) if width}):
        start = position
        for i, (m, width) in enumerate(zip(members, widths, strict=True)):
            if m == who and width:
                offsets[i] = position
                position += width
        ranges.append(SharedRange(members=who, size=position - start))
    return offsets, ranges


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Rows of one side that are computed together.

    Attributes:
        segments: whole segments, or the one that ``rows`` are a piece of.
        rows: local row numbers.
        slots: for each row the position of its segment in ``segments``.
        is_complete: all rows of the batch in these segments are here, so their sums can be taken from the chunk alone.
        width: longest row.
    """

    segments: list[Segment]
    rows: list[int]
    slots: list[int]
    is_complete: bool
    width: int


def chunks(segments: Sequence[Segment], budget: int) -> Iterator[Chunk]:
    """Cuts the segments of one side into chunks of about ``budget`` elements.

    Small segments go together; one that other ranks share, or that is larger than the budget, is not complete.
    """
    pending: list[Segment] = []
    elements = 0
    for segment in segments:
        size = len(segment.rows) * segment.width
        if segment.shared_width or size > budget:
            rows_at_once = max(1, budget // segment.width)
            for first in range(0, len(segment.rows), rows_at_once):
                piece = segment.rows[first : first + rows_at_once]
                yield Chunk(
                    segments=[segment], rows=piece, slots=[0] * len(piece), is_complete=False, width=segment.width
                )
            continue
        if pending and elements + size > budget // _PACKING_MARGIN:
            yield _pack(pending)
            pending, elements = [], 0
        pending.append(segment)
        elements += size
    if pending:
        yield _pack(pending)


_PACKING_MARGIN = 4
"""Sums over several packed segments cost more an element than over one, so only small ones are packed."""


def _pack(segments: list[Segment]) -> Chunk:
    return Chunk(
        segments=list(segments),
        rows=[row for s in segments for row in s.rows],
        slots=[slot for slot, s in enumerate(segments) for _ in s.rows],
        is_complete=True,
        width=max(s.width for s in segments),
    )


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
