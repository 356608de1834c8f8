"""The k largest of a batch, by counting."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gtpo_megatron.algorithms.batch.reduction import LocalReduction
from gtpo_megatron.algorithms.losses.selection import largest, ordered_integers

floats = st.floats(width=32, allow_nan=False)


@given(st.lists(floats, min_size=1, max_size=30))
def test_integers_keep_the_order(values: list[float]) -> None:
    tensor = torch.tensor(values, dtype=torch.float32)
    keys = ordered_integers(tensor)
    assert bool((keys >= 0).all())
    assert bool((keys < 2**32).all())
    assert torch.equal(keys[:, None] < keys, tensor[:, None] < tensor)
    assert torch.equal(keys[:, None] == keys, tensor[:, None] == tensor)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 2**33 - 1), st.booleans()), min_size=1, max_size=30), st.integers(0, 32))
def test_largest_of_the_candidates(rows: list[tuple[int, bool]], count: int) -> None:
    keys = torch.tensor([[key for key, _ in rows]])
    candidates = torch.tensor([[chosen for _, chosen in rows]])
    got = largest(keys, candidates, count, LocalReduction())
    ranked = sorted((key for key, chosen in rows if chosen), reverse=True)
    least = ranked[min(count, len(ranked)) - 1] if count and ranked else 2**40
    assert got.tolist() == [[chosen and key >= least for key, chosen in rows]]
