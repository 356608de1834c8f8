"""Sums of grid points do not depend on order."""

import math

import pytest
import torch
from gtpo_megatron.algorithms.fixed_point import (
    from_limbs,
    grid_scale,
    grid_unit,
    integer_sums,
    power_of_two,
    to_limbs,
)
from hypothesis import given
from hypothesis import strategies as st


def test_powers_of_two_are_exact() -> None:
    exponents = torch.tensor([-1022, -1, 0, 1, 62, 1023])
    assert power_of_two(exponents).tolist() == [2.0**e for e in exponents.tolist()]
    assert power_of_two(torch.tensor([-5000, 5000])).tolist() == [2.0**-1022, 2.0**1023]


@given(st.floats(1e-200, 1e200))
def test_the_scale_is_the_largest_that_fits(bound: float) -> None:
    scale = float(grid_scale(torch.tensor([bound], dtype=torch.float64)))
    assert bound * scale < 2.0**62
    assert bound * scale * 2 >= 2.0**62
    assert math.frexp(scale)[0] == 0.5


def test_nothing_to_sum_needs_no_grid() -> None:
    assert float(grid_scale(torch.zeros(1, dtype=torch.float64))) == 1.0


@pytest.mark.parametrize("num_terms", [1, 2, 2047, 2048, 4096, 131072])
@pytest.mark.parametrize("bound", [1.0, 2.0**-900, 3.7e250])
def test_integer_sums_are_those_of_the_rounded_terms(num_terms: int, bound: float) -> None:
    generator = torch.Generator().manual_seed(0)
    values = (2 * torch.rand(num_terms, 2, generator=generator, dtype=torch.float64) - 1) * bound
    unit = grid_unit(torch.full((1, 2), bound, dtype=torch.float64), num_terms)
    assert float(unit.max()) <= bound * 2.0 ** -min(50, 60 - num_terms.bit_length())
    sums = integer_sums(values, unit, 0, out=torch.empty_like(values))
    for column in (0, 1):
        assert int(sums[column]) == sum(round(v / float(unit[0, column])) for v in values[:, column].tolist())
    worst = torch.full((num_terms, 2), -bound, dtype=torch.float64)
    assert integer_sums(worst, unit, 0, out=worst)[0] * unit[0, 0] == pytest.approx(-num_terms * bound, rel=1e-12)


@given(st.lists(st.integers(-(2**62), 2**62), min_size=1, max_size=50))
def test_limbs_carry_sums_that_overflow(values: list[int]) -> None:
    limbs = to_limbs(torch.tensor(values)).sum(0)
    assert float(from_limbs(limbs)) == pytest.approx(float(sum(values)), rel=1e-15, abs=4096)
