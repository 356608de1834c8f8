"""Sums over rows that are the same bit for bit in any order."""

import math

import pytest
import torch
from gtpo_megatron.algorithms.row_sums import row_sums, sums_and_squares


def sums(values: torch.Tensor, bound: float, longest: int) -> torch.Tensor:
    out = torch.empty(2, len(values), dtype=torch.float64)
    bounds = torch.full((len(values),), bound, dtype=torch.float64)
    sums_and_squares(values.clone(), bounds, longest, squares=torch.empty_like(values), out=out)
    return out


@pytest.mark.parametrize("size", [1e-9, 1.0, 1e6])
def test_order_and_padding_change_no_bit(size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    values = size * (2 * torch.rand(3, 1000, dtype=torch.float64, generator=generator) - 1)
    whole = sums(values, size, 1000)
    order = torch.randperm(1000, generator=generator)
    padded = torch.nn.functional.pad(values[:, order], (0, 117))
    assert torch.equal(sums(padded, size, 1000), whole)
    for row in range(3):
        exact = values[row].tolist()
        assert float(whole[0, row]) == pytest.approx(math.fsum(exact), abs=size * 1e-12)
        assert float(whole[1, row]) == pytest.approx(math.fsum(v * v for v in exact), rel=1e-12)


def test_values_may_be_kept() -> None:
    values = torch.tensor([[0.1, 0.2, -0.4], [1.0, 0.0, 0.0]], dtype=torch.float64)
    before = values.clone()
    sums = row_sums(values, torch.tensor([0.4, 1.0], dtype=torch.float64), 3, out=torch.empty_like(values))
    assert sums.tolist() == pytest.approx([-0.1, 1.0], abs=1e-15)
    assert torch.equal(values, before)


def test_a_row_of_zeros() -> None:
    assert sums(torch.zeros(2, 5, dtype=torch.float64), 0.0, 5).tolist() == [[0, 0], [0, 0]]
