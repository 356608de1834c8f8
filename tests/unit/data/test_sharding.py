"""Dealing is complete, balanced and deterministic."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.step_waits import shares
from gtpo_megatron.data.sharding import mini_batch_groups, shard_by_updates, shard_contiguous

lengths = st.lists(st.integers(0, 50), max_size=30)


@given(lengths=lengths, num_ranks=st.integers(1, 6))
def test_every_row_once_and_balanced(lengths: list[int], num_ranks: int) -> None:
    rows = shard_contiguous(lengths, num_ranks)
    assert len(rows) == num_ranks
    assert sorted(row for mine in rows for row in mine) == list(range(len(lengths)))
    loads = [sum(lengths[row] for row in mine) for mine in rows]
    assert max(loads) <= sum(lengths) / num_ranks + max(lengths, default=0)
    assert shard_contiguous(lengths, num_ranks) == rows


@given(lengths=lengths, num_ranks=st.integers(1, 6))
def test_neighbours_stay_together(lengths: list[int], num_ranks: int) -> None:
    rows = shard_contiguous(lengths, num_ranks)
    assert [row for mine in rows for row in mine] == list(range(len(lengths)))


def test_equal_shares_cut_where_they_should() -> None:
    assert shard_contiguous([4, 4, 4, 4, 8], 3) == [(0, 1), (2, 3), (4,)]
    assert shard_contiguous([0, 0], 2) == [(0, 1), ()]
    assert shard_contiguous([], 2) == [(), ()]


GROUP_SIZE = 2


@given(
    lengths=lengths,
    num_ranks=st.integers(1, 6),
    size=st.integers(0, 8),
    num_updates=st.integers(1, 5),
)
def test_every_update_is_balanced(lengths: list[int], num_ranks: int, size: int, num_updates: int) -> None:
    """Also where mini-batches overlap, and where they leave some groups out."""
    groups = [row // GROUP_SIZE for row in range(len(lengths))]
    labels = tuple(dict.fromkeys(groups))
    updates = (
        []
        if not labels
        else mini_batch_groups(labels, mini_batch_prompts=size, num_updates=num_updates, seed=0, step=1)
    )
    rows = shard_by_updates(lengths, groups, updates, num_ranks)
    assert sorted(row for mine in rows for row in mine) == list(range(len(lengths)))
    assert all(list(mine) == sorted(mine) for mine in rows)
    users = [tuple(update for update, chosen in enumerate(updates) if group in chosen) for group in groups]
    for update in range(len(updates)):
        used = [row for row in range(len(lengths)) if update in users[row]]
        num_parts = len({users[row] for row in used})
        loads = [sum(lengths[row] for row in mine if update in users[row]) for mine in rows]
        most = sum(lengths[row] for row in used) / num_ranks + num_parts * max(lengths, default=0)
        assert max(loads) <= most + 1e-9


@given(lengths=lengths, num_ranks=st.integers(1, 6))
def test_updates_of_all_groups_change_nothing(lengths: list[int], num_ranks: int) -> None:
    groups = [row // GROUP_SIZE for row in range(len(lengths))]
    labels = tuple(dict.fromkeys(groups))
    for updates in ([], [labels], [labels, labels]):
        assert shard_by_updates(lengths, groups, updates, num_ranks) == shard_contiguous(lengths, num_ranks)


def test_mini_batches_wait_for_no_replica() -> None:
    """The time of an update is that of its slowest replica. One shard of the whole batch made it a third longer."""
    found = shares(128, 32, 4, seed=0)
    assert found["update_at_once"] > 1.2
    assert found["update_by_update"] < 1.03
    assert found["step_by_update"] < 1.03, "scoring takes as long as before"


GROUPS = (10, 11, 12, 13, 14, 15)


@pytest.mark.parametrize("size", [0, 6, 9])
def test_the_whole_batch_every_time(size):
    assert mini_batch_groups(GROUPS, mini_batch_prompts=size, num_updates=2, seed=0, step=1) == [GROUPS, GROUPS]


def test_a_pass_uses_every_group_once_and_then_starts_over():
    updates = mini_batch_groups(GROUPS, mini_batch_prompts=2, num_updates=4, seed=0, step=1)
    assert sorted(group for update in updates[:3] for group in update) == list(GROUPS)
    assert updates[3] == updates[0]


def test_a_size_that_does_not_divide_goes_on_into_the_next_pass():
    updates = mini_batch_groups(GROUPS, mini_batch_prompts=4, num_updates=3, seed=0, step=1)
    assert all(len(set(update)) == 4 for update in updates)
    dealt = [group for update in updates for group in update]
    assert sorted(dealt[:6]) == sorted(dealt[6:]) == list(GROUPS)


def test_seed_and_step_make_the_order():
    def order(seed, step):
        return mini_batch_groups(range(100), mini_batch_prompts=50, num_updates=1, seed=seed, step=step)

    assert order(0, 1) == order(0, 1)
    assert order(0, 1) != order(0, 2)
    assert order(0, 1) != order(1, 1)
