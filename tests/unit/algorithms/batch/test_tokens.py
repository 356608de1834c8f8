"""Flat tokens of any mask."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gtpo_megatron.algorithms.batch.tokens import LOWEST_ENTROPY, Tokens
from gtpo_megatron.errors import DataError

masks = st.integers(0, 4).flatmap(
    lambda width: st.lists(st.lists(st.booleans(), min_size=width, max_size=width), max_size=4).map(
        lambda rows: torch.tensor(rows, dtype=torch.bool).reshape(len(rows), width)
    )
)


@given(masks)
def test_tokens_are_those_of_the_mask_in_order(mask: torch.Tensor) -> None:
    tokens = Tokens.of(mask)
    places = [(i, t) for i, row in enumerate(mask.tolist()) for t, own in enumerate(row) if own]
    assert torch.equal(tokens.mask, mask)
    assert tokens.lengths.tolist() == mask.sum(1).tolist()
    assert tokens.row.tolist() == [i for i, _ in places]
    for i, place in enumerate(places):
        assert tokens.place(torch.arange(len(places)) == i) == place
    assert tokens.position.tolist() == [sum(mask[i, :t].tolist()) for i, t in places]  # own tokens before it
    first = 100 * torch.arange(len(mask))
    assert torch.equal(tokens.numbered_from(first), 100 * tokens.row + tokens.position)


@given(masks)
def test_put_is_the_inverse_of_pick(mask: torch.Tensor) -> None:
    tokens = Tokens.of(mask)
    matrix = torch.arange(float(mask.numel())).view(mask.shape) + 1
    assert torch.equal(tokens.put(tokens.pick(matrix)), torch.where(mask, matrix, 0.0))
    assert tokens.put(tokens.pick(matrix)).dtype == torch.float32
    assert tokens.spread(torch.arange(len(mask))).tolist() == tokens.row.tolist()


def test_a_view_that_is_not_contiguous_will_do() -> None:
    matrix = torch.arange(12.0).view(4, 3).t()
    mask = (torch.arange(12) % 2 == 0).view(4, 3).t()
    assert Tokens.of(mask).pick(matrix).tolist() == matrix[mask].tolist()


def test_counts() -> None:
    tokens = Tokens.of(torch.tensor([[True, False, True], [False, False, False], [False, True, False]]))
    assert tokens.counts(None).tolist() == [2, 0, 1]
    assert tokens.counts(torch.tensor([False, True, False])).tolist() == [1, 0, 0]


def test_no_gradient_is_carried_along() -> None:
    matrix = torch.ones(2, 2, requires_grad=True)
    tokens = Tokens.of(torch.ones(2, 2, dtype=torch.bool))
    assert not tokens.pick(matrix).requires_grad


MASK = torch.tensor([[False, True, False], [True, False, True]])


@pytest.mark.parametrize("foreign", [math.nan, math.inf, -9.0])
def test_foreign_values_are_not_looked_at(foreign: float) -> None:
    values = torch.where(MASK, 2.0, foreign)
    assert Tokens.of(MASK).checked("h", values).tolist() == [2.0] * 3


def test_what_rounding_left_below_zero_is_zero() -> None:
    values = torch.full((2, 3), LOWEST_ENTROPY / 2)
    assert Tokens.of(MASK).checked("h", values).tolist() == [0.0] * 3
    assert Tokens.of(MASK).checked("h", -values, sign=-1.0).tolist() == [0.0] * 3
    assert values[0, 1] == LOWEST_ENTROPY / 2  # the caller's tensor stays


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -2e-4])
def test_the_first_bad_value_is_named(value: float) -> None:
    values = torch.ones(2, 3, dtype=torch.float64)
    values[1, 2] = value
    with pytest.raises(DataError, match=rf"^h\[1, 2\] = {value}: expected a finite value >= -0.0001"):
        Tokens.of(MASK).checked("h", values)
    with pytest.raises(DataError, match=rf"^h\[1, 2\] = {-value}: expected a finite value <= 0.0001"):
        Tokens.of(MASK).checked("h", -values, sign=-1.0)


def test_no_tokens() -> None:
    for shape in ((0, 3), (3, 0), (0, 0)):
        tokens = Tokens.of(torch.zeros(shape, dtype=torch.bool))
        assert tokens.checked("h", torch.zeros(shape)).shape == (0,)
        assert tokens.put(torch.zeros(0)).shape == shape
        assert tokens.position.shape == (0,)
