"""Standardising: constants, narrow pools, wide pools, zeros of the other side."""

import math

import pytest
import torch

from gtpo_megatron.algorithms.batch.reduction import LocalReduction
from gtpo_megatron.algorithms.credit.standardise import REWARD_ROUNDING, ROUNDING, Pools, pools, standardise
from tests.faked_ranks import World
from tests.unit.algorithms.parts import column, table_of


def one_pool(count: int) -> Pools:
    """All of them in one pool, and an empty one for those that take no part."""
    return Pools(index=torch.zeros(count).long(), own=torch.tensor([count, 0]), zeros=torch.tensor([0, 0]))


def advantages(values: list[float], **options: object) -> list[float]:
    chosen = {"ddof": 0, "eps": 0.0, "reduction": LocalReduction(), **options}
    pooled = one_pool(len(values))
    return standardise(column(*values), pooled.index, pooled, **chosen).tolist()


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


# ---------------------------------------------------------------------------------------------------------------- pools
# O+ of group 0, O- of it, O+ of group 1, a response that takes no part, O- of group 1
TABLE = table_of([1, 0, 1, 1, 0], [0, 0, 1, 1, 1], [2, 3, 4, 5, 6])
TAKES_PART = torch.tensor([True, True, True, False, True])


@pytest.mark.parametrize(
    ("kind", "spans_batch", "index", "own", "zeros"),
    [
        ("combined", True, [0, 0, 0, 1, 0], [15, 5], [0, 0]),
        ("combined", False, [0, 0, 1, 2, 1], [5, 10, 5], [0, 0, 0]),
        ("per_set", True, [1, 0, 1, 2, 0], [9, 6, 5], [0, 0, 0]),
        ("per_set", False, [1, 0, 3, 4, 2], [3, 2, 6, 4, 5], [0] * 5),
        ("joint_zero", True, [1, 0, 1, 2, 0], [9, 6, 5], [6, 9, 0]),
        ("joint_zero", False, [1, 0, 3, 4, 2], [3, 2, 6, 4, 5], [2, 3, 4, 6, 0]),
    ],
)
def test_pools(kind: str, spans_batch: bool, index: list[int], own: list[int], zeros: list[int]) -> None:
    found = pools(TABLE, TABLE.lengths, kind, spans_batch=spans_batch, takes_part=TAKES_PART)
    assert found.index.tolist() == index
    assert found.own.tolist() == own
    assert found.zeros.tolist() == zeros


def of_two_sides(values: list[float], rewards: list[float], kind: str, **options: object) -> list[float]:
    table = table_of(rewards, [0] * len(values), [1] * len(values))
    pooled = pools(table, table.lengths, kind, spans_batch=True, takes_part=table.is_live)
    chosen = {"ddof": 0, "eps": 0.0, "reduction": LocalReduction(), **options}
    return standardise(column(*values), pooled.index, pooled, **chosen).tolist()


def test_zeros_of_the_other_side() -> None:
    joint = of_two_sides([1.0, 3.0, -2.0], [1.0, 1.0, 0.0], "joint_zero")
    assert joint[:2] == pytest.approx([-1 / 3 / math.sqrt(14 / 9), 5 / 3 / math.sqrt(14 / 9)])
    assert joint[2] == pytest.approx(-(2.0**0.5))
    own = of_two_sides([1.0, 3.0, -2.0], [1.0, 1.0, 0.0], "per_set")
    assert own == pytest.approx([-1.0, 1.0, 0.0])
    positive = of_two_sides([0.25, 0.5, 0.25], [1.0, 1.0, 0.0], "joint_zero")  # the zeros are the lowest of each pool
    assert positive == pytest.approx([0.0, 0.25 / math.sqrt(0.125 / 3), 2**0.5])


def test_zeros_make_a_pool_of_equal_values_wide() -> None:
    assert of_two_sides([1.0, 1.0, 0.0], [1.0, 1.0, 0.0], "joint_zero") == pytest.approx([0.5**0.5, 0.5**0.5, 0.0])
    assert of_two_sides([0.0, 0.0, 0.0], [1.0, 1.0, 0.0], "joint_zero") == [0.0] * 3  # all of it is zeros


def test_what_takes_no_part_has_no_advantage_and_changes_nobodys() -> None:
    values = column(1.0, 2.0, 3.0, -9.0)
    takes_part = torch.tensor([True, True, True, False])
    table = table_of([1, 1, 1, 0], [0] * 4, [1] * 4)
    for kind in ("combined", "per_set", "joint_zero"):
        pooled = pools(table, table.lengths, kind, spans_batch=True, takes_part=takes_part)
        got = standardise(values, pooled.index, pooled, ddof=0, eps=0.0, reduction=LocalReduction())
        assert got.tolist() == pytest.approx([-(1.5**0.5), 0.0, 1.5**0.5, 0.0])


@pytest.mark.parametrize("kind", ["combined", "per_set", "joint_zero"])
def test_any_sharding_gives_the_same_bits(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    count = 60
    values = torch.randn(count, dtype=torch.float64, generator=generator) * 10 ** (
        20 * torch.rand(count, dtype=torch.float64, generator=generator) - 10
    )
    table = table_of([i % 2 for i in range(count)], [i % 3 for i in range(count)], [1] * count)
    pooled = pools(table, table.lengths, kind, spans_batch=False, takes_part=table.is_live)
    options = {"ddof": 0, "eps": 0.0}
    whole = standardise(values, pooled.index, pooled, **options, reduction=LocalReduction())
    owners = torch.randint(0, 3, (count,), generator=generator)  # rank 3 has nothing

    def part(reduction) -> torch.Tensor:
        mine = owners == reduction.rank
        return standardise(values[mine], pooled.index[mine], pooled, **options, reduction=reduction)

    for rank, found in enumerate(World(4).run(part)):
        assert torch.equal(found, whole[owners == rank])
