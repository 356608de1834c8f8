"""The table of responses: groups by label, sides by threshold, rows without tokens nowhere."""

import pytest
import torch

from gtpo_megatron.algorithms.batch.response_table import gather_table
from tests.faked_ranks import World
from tests.unit.algorithms.parts import table_of


def test_groups_and_sides() -> None:
    table = table_of([1.0, 0.0, 0.5, 1.0, 1.0], [2**62, -5, -5, 2**62, 3], [1, 2, 3, 0, 4])
    assert table.group_index.tolist() == [2, 0, 0, 2, 1]
    assert table.num_groups == 3
    assert table.rewards.tolist() == [1.0, 0.0, 0.5, 1.0, 1.0]
    assert table.is_correct.tolist() == [True, False, True, False, True]
    assert table.is_live.tolist() == [True, True, True, False, True]
    assert table.lengths.tolist() == [1, 2, 3, 0, 4]
    assert table.is_one_sided.tolist() == [False, True, True]
    assert table.mine == slice(0, 5)
    assert table.scope(spans_batch=False).tolist() == [2, 0, 0, 2, 1]
    assert table.scope(spans_batch=True).tolist() == [0] * 5
    assert table.sides(spans_batch=False).tolist() == [5, 0, 1, 4, 3]
    assert table.sides(spans_batch=True).tolist() == [1, 0, 1, 0, 1]


def test_the_threshold_is_reached_or_not() -> None:
    assert table_of([0.3, 0.29], [0, 0], [1, 1], threshold=0.3).is_correct.tolist() == [True, False]
    assert table_of([0.7, 0.69], [0, 0], [1, 1], threshold=0.7).is_correct.tolist() == [True, False]


@pytest.mark.parametrize("lengths", [[0, 0], [3, 2**40]])
def test_a_group_is_judged_by_responses_with_tokens(lengths: list[int]) -> None:
    table = table_of([1.0, 0.0], [7, 7], lengths)
    assert table.is_one_sided.tolist() == [lengths[0] == 0]
    assert table.lengths.tolist() == lengths


def test_every_rank_has_the_same_table() -> None:
    given = [([1.0, 0.0], [4, 5], [2, 1]), ([], [], []), ([1.0], [4], [3])]

    def build(reduction):
        rewards, labels, lengths = given[reduction.rank]
        return gather_table(
            lambda: (
                torch.tensor(rewards),
                torch.tensor(labels, dtype=torch.int64),
                torch.tensor(lengths, dtype=torch.int64),
            ),
            success_threshold=0.5,
            reduction=reduction,
            signature="",
        )

    tables = World(3).run(build)
    for rank, table in enumerate(tables):
        assert table.group_index.tolist() == [0, 1, 0]
        assert table.lengths.tolist() == [2, 1, 3]
        assert table.mine == [slice(0, 2), slice(2, 2), slice(2, 3)][rank]
