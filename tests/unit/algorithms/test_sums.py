"""Sums that do not depend on the order of their terms."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gtpo_megatron.algorithms.sums import ExactSum, Reduction, exact_sum, significant
from tests.unit.algorithms.parts import column

LARGEST = 2.0**950
values_of_any_size = st.one_of(
    st.floats(-8, 8), st.floats(-1e200, 1e200), st.floats(-1e-200, 1e-200), st.sampled_from([0.0, LARGEST, 1 / LARGEST])
)


def summed(values: Tensor, key: Tensor | None = None, num_keys: int = 1) -> ExactSum:
    keys = torch.zeros(len(values), dtype=torch.int64) if key is None else key
    return exact_sum(values, keys, torch.bincount(keys, minlength=num_keys), Reduction())


@given(st.lists(values_of_any_size, max_size=40), st.randoms(use_true_random=False))
def test_any_order_gives_the_same_integers(values: list[float], random) -> None:
    whole = summed(column(*values))
    moved = summed(column(*random.sample(values, len(values))))
    assert torch.equal(whole.units, moved.units)
    assert torch.equal(whole.scale, moved.scale)
    # half a step a term, and steps are 2 ** -61 of what the sum may take
    bound = len(values) ** 2 * max(map(abs, values), default=0.0)
    exact = sum(map(Fraction, values), Fraction())
    slack = Fraction(bound) / 2**61 + abs(exact) / 2**52 + Fraction(len(values)) / 2**1023
    assert abs(Fraction(float(whole.total)) - exact) <= slack


def test_every_key_has_a_grid_of_its_own() -> None:
    sums = summed(column(1e30, 1e-30, 3e-30, 0.5, 0.25), torch.tensor([0, 1, 1, 3, 3]), 5)
    assert sums.total.tolist() == pytest.approx([1e30, 4e-30, 0.0, 0.75, 0.0], rel=1e-15)
    assert sums.mean.tolist() == pytest.approx([1e30, 2e-30, 0.0, 0.375, 0.0], rel=1e-15)
    assert sums.count.tolist() == [1, 2, 0, 2, 0]
    assert all(math.frexp(scale)[0] == 0.5 for scale in sums.scale.tolist())


@pytest.mark.parametrize("count", [1, 2, 3, 7, 1000, 3_000_001])
@pytest.mark.parametrize("value", [1.0, 0.1, 1 / 3, 1e-8, 7.3e200, 2.0**-950, -5.7])
def test_the_mean_of_equal_values_is_exactly_that_value(value: float, count: int) -> None:
    rounded = significant(column(value))
    assert float(summed(rounded.expand(count)).mean) == float(rounded)


@pytest.mark.parametrize("count", [2**29, 2**28 + 1])
def test_and_so_it_is_for_counts_beyond_what_fits_here(count: int) -> None:
    """The terms are on other ranks: this one only sees their number and their sum."""
    value = significant(column(0.1))

    class Others:
        def max(self, values: Tensor) -> Tensor:
            return values

        def sum(self, values: Tensor) -> Tensor:
            return values * count

    found = exact_sum(value, torch.zeros(1, dtype=torch.int64), torch.tensor([count]), Others())
    assert float(found.mean) == float(value)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("peak", [1.0, math.nextafter(2.0, 1), 3.7e250, LARGEST, 2.0**-1000, 5e-324])
@pytest.mark.parametrize("count", [1, 2, 3, 1023, 1024, 1025, 2**31, 2**50 - 1])
def test_no_sum_overflows(peak: float, count: int, sign: float) -> None:
    """``count`` terms of the largest magnitude: the integer is within an int64, with a bit to spare."""
    units = exact_sum(column(sign * peak), torch.zeros(1, dtype=torch.int64), torch.tensor([count]), Reduction())
    assert abs(int(units.units)) * count <= 2**62 + count
    if peak * count > 2.0**-900:
        assert abs(int(units.units)) * count > 2**60 - count  # and no digit is wasted


@pytest.mark.parametrize(("num_values", "num_keys"), [(0, 0), (0, 3)])
def test_no_terms(num_values: int, num_keys: int) -> None:
    sums = summed(torch.zeros(num_values, dtype=torch.float64), torch.zeros(0, dtype=torch.int64), num_keys)
    assert sums.total.tolist() == [0.0] * num_keys
    assert sums.mean.tolist() == [0.0] * num_keys


def test_the_values_stay_what_they_are() -> None:
    values = column(0.1, -0.3)
    before = values.clone()
    summed(values)
    assert torch.equal(values, before)


@given(st.floats(-1e290, 1e290))
def test_significant(value: float) -> None:
    given_value = column(value)
    rounded = float(significant(given_value))
    assert float(given_value) == value
    assert abs(rounded - value) <= 2.0**-32 * abs(value) + 2.0**-1040
    if abs(value) > 1e-290:
        mantissa, _ = math.frexp(rounded)
        assert mantissa * 2**32 == int(mantissa * 2**32)
        assert float(significant(column(rounded))) == rounded
        assert float(significant(column(-value))) == -rounded


def test_float32_numbers_are_significant_as_they_are() -> None:
    values = torch.rand(1000, generator=torch.Generator().manual_seed(0)).double()
    assert torch.equal(significant(values), values)


def test_keys_of_any_integer_type() -> None:
    values, flags = column(1.0, 2.0, 4.0), torch.tensor([True, False, True])
    for keys in (flags, flags.to(torch.int32), flags.to(torch.uint8), flags.to(torch.int64)):
        found = exact_sum(values, keys, torch.tensor([1, 2]), Reduction())
        assert found.total.tolist() == [2.0, 5.0]
