"""Segments, what of them travels, and chunks that cover them once."""

from dataclasses import replace

import torch
from gtpo_megatron.algorithms.segments import chunks, length_lists, live_counts, plan_segments

from gtpo_megatron.algorithms.batch.reduction import SharedRange
from tests.unit.algorithms.test_table import build


def dealt(owners: list[int], rank: int):
    table = build([1, 1, 0, 0, 1, 0], [0, 0, 0, 0, 1, 1], [5, 3, 4, 2, 6, 0])
    return replace(table, owners=torch.tensor(owners), rank=rank)


def test_one_rank_shares_nothing() -> None:
    plan = plan_segments(dealt([0] * 6, 0), spans_batch=False, shares_one_value=False)
    assert [(s.index, s.width, s.shared_width) for s in plan.segments] == [(0, 4, 0), (3, 6, 0), (1, 5, 0)]
    assert plan.counts.tolist() == [2, 2, 0, 1]
    assert plan.ranges == []
    assert plan.order.tolist() == [2, 3, 4, 0, 1]
    assert plan.segment_of_row.tolist() == [1, 1, 0, 0, 3, -1]


def test_split_segments_share_up_to_the_second_longest() -> None:
    # O+ of group 0 is split (5 here, 3 there); O- is whole on rank 1; group 1 is whole on rank 0
    plan = plan_segments(dealt([0, 1, 1, 1, 0, 0], 0), spans_batch=False, shares_one_value=False)
    assert {s.index: s.shared_width for s in plan.segments} == {3: 0, 1: 3}
    assert plan.ranges == [SharedRange(members=(0, 1), size=3)]
    single = plan_segments(dealt([0, 1, 1, 1, 0, 0], 0), spans_batch=False, shares_one_value=True)
    assert single.num_shared == 1


def test_a_rank_without_rows_has_no_segments() -> None:
    plan = plan_segments(dealt([0, 1, 1, 1, 0, 0], 2), spans_batch=False, shares_one_value=False)
    assert plan.segments == []
    assert plan.num_shared == 0


def test_the_batch_is_one_scope() -> None:
    plan = plan_segments(dealt([0] * 6, 0), spans_batch=True, shares_one_value=False)
    assert [(s.index, s.last - s.first) for s in plan.segments] == [(0, 2), (1, 3)]


def test_counts_are_those_of_the_lengths() -> None:
    table = dealt([0, 1, 1, 1, 0, 0], 0)
    plan = plan_segments(table, spans_batch=False, shares_one_value=False)
    counts = live_counts(length_lists(table, plan), 6)
    assert counts.tolist() == [[2, 2, 1, 1, 0, 0], [2, 2, 2, 1, 1, 0], [0] * 6, [1] * 6]


def test_chunks_cover_rows_once_and_pack_equals() -> None:
    groups, size = 20, 4
    lengths = [1 + (7 * i) % 9 for i in range(groups * size)]
    table = build(
        [float(i % 4 < 1 + (i // 4) % 2) for i in range(groups * size)],
        [i // size for i in range(groups * size)],
        lengths,
    )
    plan = plan_segments(table, spans_batch=False, shares_one_value=False)
    for budget in (1, 40, 10**6):
        for side in (0, 1):
            mine = [s for s in plan.segments if s.index % 2 == side]
            parts = list(chunks(mine, budget))
            covered = [row for part in parts for row in range(part.first, part.last)]
            assert covered == list(range(mine[0].first, mine[-1].last))
            for part in parts:
                assert len({s.last - s.first for s in part.segments}) == 1
                assert part.width == max(s.width for s in part.segments)
                assert part.is_complete or len(part.segments) == 1
    assert len(list(chunks([s for s in plan.segments if s.index % 2], 10**6))) == 2  # one and two rows a segment
