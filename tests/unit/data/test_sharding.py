"""Dealing is complete, balanced and deterministic."""

from hypothesis import given
from hypothesis import strategies as st

from gtpo_megatron.data.sharding import shard_contiguous

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
