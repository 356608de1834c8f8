"""Standardising: constants, narrow pools, wide pools."""

import math

import pytest
import torch
from gtpo_megatron.algorithms.pools import standardise
from gtpo_megatron.algorithms.responses import one_token_table, response_values
from gtpo_megatron.algorithms.shaping import PoolRule, ShapingRules, SideRule
from gtpo_megatron.algorithms.share_grid import ShareRule

from gtpo_megatron.algorithms.batch.reduction import LocalReduction
from tests.unit.algorithms.test_table import build


def advantages(values: list[float], rule: PoolRule, rewards: list[float] | None = None) -> list[float]:
    """Of values that are their own rewards."""
    table = build(rewards or [1.0] * len(values), [0] * len(values), [1] * len(values))
    tensor = torch.tensor(values, dtype=torch.float64)
    identity = SideRule(base=0.0, slope=1.0)
    result = standardise(
        response_values(tensor),
        table.is_live[:, None],
        one_token_table(table, tensor),
        ShapingRules(share=ShareRule(), sides=(identity, identity), pool=rule),
        LocalReduction(),
        penalties=torch.zeros(len(values), dtype=torch.float64),
        is_pooled=table.is_live,
    )
    assert result.shaped_rewards[:, 0].tolist() == pytest.approx(values)
    return result.advantages[:, 0].tolist()


COMBINED = PoolRule(spans_batch=True, kind="combined")


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1e9, 1e-300, -7.3])
@pytest.mark.parametrize("count", [1, 2, 3, 1000])
def test_a_constant_pool_gives_zeros(value: float, count: int) -> None:
    assert advantages([value] * count, COMBINED) == [0.0] * count


def test_rounding_noise_is_a_constant() -> None:
    assert advantages([1.0, 1.0 + 1e-13], COMBINED) == [0.0, 0.0]
    assert advantages([1e6, 1e6 + 1e-8], COMBINED) == [0.0, 0.0]


@pytest.mark.parametrize(("center", "spread"), [(0.0, 1.0), (1.0, 1e-9), (1e6, 1e-3), (-5.0, 1e-8), (3.0, 1e20)])
def test_a_narrow_pool_keeps_its_digits(center: float, spread: float) -> None:
    values = [center + spread * v for v in (-1.0, 0.0, 0.0, 2.5)]
    exact = [v - center for v in values]
    mean = math.fsum(exact) / 4
    std = math.sqrt(math.fsum((v - mean) ** 2 for v in exact) / 4)
    assert advantages(values, COMBINED) == pytest.approx([(v - mean) / std for v in exact], rel=1e-6, abs=1e-6)


def test_one_outlier_among_many() -> None:
    count = 100_000
    got = advantages([0.0] * (count - 1) + [1.0], COMBINED)
    assert got[-1] == pytest.approx(math.sqrt(count - 1), rel=1e-6)
    assert got[0] == pytest.approx(-1 / math.sqrt(count - 1), rel=1e-6)


def test_ddof_eps_and_centring() -> None:
    values = [1.0, 3.0]
    assert advantages(values, PoolRule(spans_batch=True, kind="combined", ddof=1)) == pytest.approx(
        [-(0.5**0.5), 0.5**0.5]
    )
    assert advantages(values, PoolRule(spans_batch=True, kind="combined", eps=1.0)) == pytest.approx([-0.5, 0.5])
    assert advantages(values, PoolRule(spans_batch=True, kind="combined", divides_by_std=False)) == [-1.0, 1.0]
    assert advantages([3.0], PoolRule(spans_batch=True, kind="combined", ddof=1)) == [0.0]


def test_zeros_of_the_other_side() -> None:
    joint = advantages([1.0, 3.0, -2.0], PoolRule(spans_batch=True), [1.0, 1.0, 0.0])
    assert joint[:2] == pytest.approx([-1 / 3 / math.sqrt(14 / 9), 5 / 3 / math.sqrt(14 / 9)])
    assert joint[2] == pytest.approx(-(2.0**0.5))
    own = advantages([1.0, 3.0, -2.0], PoolRule(spans_batch=True, kind="per_set"), [1.0, 1.0, 0.0])
    assert own == pytest.approx([-1.0, 1.0, 0.0])
