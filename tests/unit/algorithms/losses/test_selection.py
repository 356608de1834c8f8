"""The k largest of a batch, by counting."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gtpo_megatron.algorithms.losses.selection import largest, num_selected, ordered_integers
from gtpo_megatron.algorithms.sums import Reduction
from tests.unit.algorithms.parts import batch_of

floats = st.floats(width=32, allow_nan=False)


def test_integers_of_the_ends_of_the_range() -> None:
    smallest = 2.0**-149
    values = torch.tensor([-torch.inf, -smallest, -0.0, 0.0, smallest, torch.inf], dtype=torch.float64)
    infinity, zero = 0x7F80_0000, 2**31
    expected = [zero - 1 - infinity, zero - 2, zero, zero, zero + 1, zero + infinity]
    assert ordered_integers(values).tolist() == expected


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
    keys = torch.tensor([key for key, _ in rows])
    candidates = torch.tensor([chosen for _, chosen in rows])
    got = largest(keys, candidates, count, Reduction())
    ranked = sorted((key for key, chosen in rows if chosen), reverse=True)
    least = ranked[min(count, len(ranked)) - 1] if count and ranked else 2**40
    assert got.tolist() == [chosen and key >= least for key, chosen in rows]


@pytest.mark.parametrize(
    ("fraction", "num_tokens", "wanted"), [(0.0, 10, 0), (1e-9, 10, 1), (0.25, 10, 2), (1.0, 10, 10)]
)
def test_a_fraction_of_the_batch(fraction: float, num_tokens: int, wanted: int) -> None:
    assert num_selected(batch_of([num_tokens], []), fraction) == wanted
