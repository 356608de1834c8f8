"""Standardising: constants, narrow pools, wide pools, zeros of the other side; which pools, the loops say."""

import math

import pytest
import torch

from gtpo_megatron.algorithms.credit.standardise import REWARD_ROUNDING, ROUNDING, Pools, standardise
from gtpo_megatron.algorithms.sums import Reduction
from tests.unit.algorithms.parts import column


def advantages(values: list[float], zeros: int = 0, **options: object) -> list[float]:
    """Of one pool that holds all values and some zeros, beside the empty one of what takes no part."""
    pools = Pools(
        index=torch.zeros(len(values)).long(),
        num_values=torch.tensor([len(values), 0]),
        num_zeros=torch.tensor([zeros, 0]),
        reduction=Reduction(),
    )
    return standardise(column(*values), pools, **{"ddof": 0, "eps": 0.0, **options}).tolist()


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1 / 3, 1e9, 1e-300, -7.3, 1.1 - 0.5])
@pytest.mark.parametrize("count", [1, 2, 3, 1000])
@pytest.mark.parametrize("eps", [0.0, 6e-5])
def test_a_constant_pool_gives_exactly_zero(value: float, count: int, eps: float) -> None:
    assert advantages([value] * count, eps=eps) == [0.0] * count
    assert advantages([value] * count, divides_by_std=False) == [0.0] * count


@pytest.mark.parametrize("value", [1.0, 0.1, 1e6, -3.7, 1e-30])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_spread_of_rounding_is_none(value: float, steps: int) -> None:
    other = value
    for _ in range(steps):
        other = math.nextafter(other, math.inf)
    for pool in ([value, other], [value, value, other], [other] * 1000 + [value]):
        assert advantages(pool) == [0.0] * len(pool)
        assert advantages(pool, divides_by_std=False) == [0.0] * len(pool)


@pytest.mark.parametrize("rounding", [ROUNDING, REWARD_ROUNDING])
@pytest.mark.parametrize("value", [0.0, 0.3, -1.0, 1e4, -1e6])
def test_rounding_is_relative_to_values_above_1(value: float, rounding: float) -> None:
    """Below 1 it is not, since values of the order of 1 may cancel."""
    edge = rounding * max(1.0, abs(value))
    assert advantages([value - 0.9 * edge, value + 0.9 * edge], rounding=rounding) == [0.0, 0.0]
    wide = advantages([value - 1.5 * edge, value + 1.5 * edge], rounding=rounding)
    assert wide == pytest.approx([-1.0, 1.0], rel=1e-3)


@pytest.mark.parametrize(("center", "spread"), [(0.0, 1.0), (1.0, 1e-9), (1e6, 1e-3), (-5.0, 1e-8), (3.0, 1e20)])
def test_a_narrow_pool_keeps_its_digits(center: float, spread: float) -> None:
    values = [center + spread * v for v in (-1.0, 0.0, 0.0, 2.5)]
    exact = [v - center for v in values]
    mean = math.fsum(exact) / 4
    std = math.sqrt(math.fsum((v - mean) ** 2 for v in exact) / 4)
    assert advantages(values) == pytest.approx([(v - mean) / std for v in exact], rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(("count", "error"), [(1000, 1e-9), (1_000_000, 1e-7)])
def test_one_outlier_among_many(count: int, error: float) -> None:
    got = advantages([0.0] * (count - 1) + [1.0])
    assert got[-1] == pytest.approx(math.sqrt(count - 1), rel=error)
    assert got[0] == pytest.approx(-1 / math.sqrt(count - 1), rel=error)


def test_ddof_eps_and_centring() -> None:
    values = [1.0, 3.0]
    assert advantages(values, ddof=1) == pytest.approx([-(0.5**0.5), 0.5**0.5])
    assert advantages(values, eps=1.0) == pytest.approx([-0.5, 0.5])
    assert advantages(values, divides_by_std=False) == [-1.0, 1.0]
    assert advantages([3.0], ddof=1) == [0.0]
    assert advantages([], ddof=1) == []


def test_zeros_of_the_other_side() -> None:
    assert advantages([1.0, 3.0], 1) == pytest.approx([-1 / 3 / math.sqrt(14 / 9), 5 / 3 / math.sqrt(14 / 9)])
    assert advantages([-2.0], 2) == pytest.approx([-(2.0**0.5)])
    assert advantages([0.25, 0.5], 1) == pytest.approx([0.0, 0.25 / math.sqrt(0.125 / 3)])  # a zero is the lowest
    assert advantages([1.0, 1.0], 1) == pytest.approx([0.5**0.5, 0.5**0.5])
    assert advantages([0.0, 0.0], 1) == [0.0] * 2  # all of it is zeros
