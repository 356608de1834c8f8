"""Sums of grid points do not depend on order."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gtpo_megatron.algorithms.fixed_point import from_limbs, grid_scale, power_of_two, rounding_constant, to_limbs


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


@pytest.mark.parametrize(("num_terms", "bits"), [(1, 0), (4096, 0), (131072, 0), (4096, 10)])
def test_gridded_sums_ignore_order_and_stay_close(num_terms: int, bits: int) -> None:
    magic, grid_bits = rounding_constant(num_terms, bits)
    generator = torch.Generator().manual_seed(0)
    values = (2 * torch.rand(num_terms, generator=generator, dtype=torch.float64) - 1) * 2**bits
    gridded = (values + magic) - magic
    assert float((gridded - values).abs().max()) <= 2.0 ** -(grid_bits + 1)
    shuffled = gridded[torch.randperm(num_terms, generator=generator)]
    assert float(gridded.sum()) == float(shuffled.sum()) == math.fsum(gridded.tolist())
    worst = torch.full((num_terms,), 2.0**bits, dtype=torch.float64)
    assert float(((worst + magic) - magic).sum()) == num_terms * 2.0**bits


@given(st.lists(st.integers(-(2**62), 2**62), min_size=1, max_size=50))
def test_limbs_carry_sums_that_overflow(values: list[int]) -> None:
    limbs = to_limbs(torch.tensor(values)).sum(0)
    assert float(from_limbs(limbs)) == pytest.approx(float(sum(values)), rel=1e-15, abs=4096)
