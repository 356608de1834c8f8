"""Entropy weights that are exactly 1, and those of entropies of any range against exact fractions."""

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from gtpo_megatron.algorithms import assign_credit
from gtpo_megatron.algorithms.credit.shaping import (
    LARGEST_WEIGHT,
    LEAST_ENTROPY,
    entropy_weights,
    shaping_entropy,
)
from gtpo_megatron.algorithms.sums import Reduction
from gtpo_megatron.config.algorithm import GRPOSConfig, GTPOConfig
from gtpo_megatron.errors import DataError
from tests.strategies import Batch
from tests.unit.algorithms.parts import column

FLOAT32 = 2.0**-24
"""Relative rounding of float32 rewards."""
BONUS_ALONE = {"alpha1": 0.0, "alpha2": 1.0}
"""With these, v6's rewards are the weights: ``x`` on O+, ``-y`` on O-."""


# -------------------------------------------------------------------------------------------------------------------- H
def test_clip_first_then_the_floor() -> None:
    config = GTPOConfig(entropy_floor=0.5, entropy_clip=(0.25, 2.0))
    entropies = column(1.0, 3.0, 0.0)
    assert shaping_entropy(config, entropies).tolist() == [1.5, 2.5, 0.75]
    assert shaping_entropy(GTPOConfig(entropy_floor=0.0), column(0.0, 1.0)).tolist() == [LEAST_ENTROPY, 1.0]
    assert entropies.tolist() == [1.0, 3.0, 0.0]


# -------------------------------------------------------------------------------------------------------------- x and y
def relative(weights: list[float], mean: str) -> list[float]:
    """The weights of tokens that are compared with each other."""
    key, count = torch.zeros(len(weights), dtype=torch.int64), torch.tensor([len(weights)])
    return entropy_weights(
        column(*weights), key == 0, key, count, mean, shaped_tokens=None, reduction=Reduction()
    ).tolist()


@pytest.mark.parametrize("mean", ["arithmetic", "geometric"])
@pytest.mark.parametrize("weight", [1.0, 0.1 + 1e-8, 1 / 3, 7e-30, 2.0**-950, 2.0**950])
@pytest.mark.parametrize("count", [1, 2, 3, 10_007])
def test_equal_weights_have_exactly_one(mean: str, weight: float, count: int) -> None:
    assert relative([weight] * count, mean) == [1.0] * count


# ---------------------------------------------------------------------------------------------------------- wide ranges
def wide_batch(seed: int, *, group_size: int, max_tokens: int, smallest: float, largest: float) -> Batch:
    """Two groups, entropies uniform in their logarithm, and some that are 0."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(2 * group_size):
        length = int(torch.randint(1, max_tokens + 1, (1,), generator=generator))
        logs = torch.rand(length, generator=generator) * math.log(largest / smallest) + math.log(smallest)
        rows.append(torch.where(torch.rand(length, generator=generator) < 0.1, 0.0, logs.exp()).tolist())
    rewards = [float(i % 2) for i in range(len(rows))]
    return Batch(rows, rewards, [i // group_size for i in range(len(rows))])


def weights_of(batch: Batch, config: GTPOConfig, shaped_tokens: Tensor | None = None) -> Tensor:
    """``x`` and ``y``, ``[B, T]`` float64."""
    arguments = batch.arguments()
    shaped = assign_credit(config, **arguments, shaped_tokens=shaped_tokens).shaped_rewards.double()
    return torch.where(arguments["rewards"][:, None] > 0.5, shaped, -shaped)


def exact_weights(batch: Batch, config: GTPOConfig) -> Tensor:
    """In rational numbers."""
    entropies = batch.arguments()["token_entropy"].tolist()
    lengths, rewards, groups = batch.lengths.tolist(), batch.rewards, batch.groups
    floor, axis, spans_batch = Fraction(config.entropy_floor), config.entropy_axis, config.entropy_scope == "batch"
    weight = [
        [Fraction(h) + floor if rewards[i] else 1 / (Fraction(h) + floor) for h in row[: lengths[i]]]
        for i, row in enumerate(entropies)
    ]
    everyone = range(len(weight))
    result = torch.zeros(len(weight), max(lengths), dtype=torch.float64)
    totals: dict[tuple, tuple[Fraction, int]] = {}
    for i in everyone:
        for t in range(lengths[i]):
            key = (rewards[i], 0 if spans_batch else groups[i])
            key += {"position": (t,), "matrix": (), "response": (i,)}[axis]
            if key not in totals:
                peers = [k for k in everyone if rewards[k] == rewards[i] and (spans_batch or groups[k] == groups[i])]
                found = {
                    "position": lambda t=t, p=peers: [weight[k][t] for k in p if lengths[k] > t],
                    "matrix": lambda p=peers: [w for k in p for w in weight[k]],
                    "response": lambda i=i: weight[i],
                }[axis]()
                totals[key] = (sum(found, Fraction()), len(found))
            total, count = totals[key]
            result[i, t] = float(weight[i][t] / total * count)
    return result


@pytest.mark.parametrize("scope", ["group", "batch"])
@pytest.mark.parametrize("axis", ["position", "matrix", "response"])
@pytest.mark.parametrize(
    ("floor", "smallest", "largest"),
    [(1e-8, 1e-6, 12.0), (1e-12, 1e-10, 12.0), (1e-20, 1e-20, 12.0), (1e-30, 1e-25, 1e30), (1e-45, 1e-38, 1e38)],
)
def test_weights_are_right_whatever_the_range(
    axis: str, scope: str, floor: float, smallest: float, largest: float
) -> None:
    batch = wide_batch(1, group_size=9, max_tokens=40, smallest=smallest, largest=largest)
    config = GTPOConfig(entropy_axis=axis, entropy_scope=scope, entropy_floor=floor, **BONUS_ALONE)
    wanted = exact_weights(batch, config)
    error = (weights_of(batch, config) - wanted).abs() / wanted.clamp(min=1e-37)
    assert float(error[batch_mask(batch)].max()) < 2 * FLOAT32


def test_one_extreme_token_ruins_no_other_position() -> None:
    tiny = Batch([[1e-20, 0.5], [1.0, 2.0]], [0, 0], [0, 0])
    weights = weights_of(tiny, GTPOConfig(entropy_floor=0.0, **BONUS_ALONE))
    torch.testing.assert_close(weights.float(), torch.tensor([[2.0, 1.6], [2e-20, 0.4]]), rtol=1e-6, atol=0)
    huge = Batch([[1e30, 0.5], [1.0, 2.0], [1.0, 1.0]], [1, 1, 0], [0] * 3)
    config = GTPOConfig(formulation="v1", entropy_floor=0.0)
    shaped = assign_credit(config, **huge.arguments()).shaped_rewards
    torch.testing.assert_close(shaped[:2], torch.tensor([[1.2, 1.04], [1.0, 1.16]]))


def batch_mask(batch: Batch) -> Tensor:
    return batch.arguments()["response_mask"]


@pytest.mark.parametrize("floor", [1e-8, 1e-16, 1e-30, 0.0])
@pytest.mark.parametrize("axis", ["position", "matrix", "response"])
def test_lone_tokens_and_columns_of_zeros_have_weight_one(axis: str, floor: float) -> None:
    batch = Batch([[0.3], [7.0, 1e-9]], [0, 1], [0, 1])
    if axis == "position":
        weights = weights_of(batch, GTPOConfig(entropy_floor=floor, **BONUS_ALONE))
        assert torch.equal(weights[batch_mask(batch)], torch.ones(3, dtype=torch.float64))
    zeros = Batch([[0.0, 0.0], [0.0, 0.0], [0.0]], [1, 1, 1], [0, 0, 0])
    weights = weights_of(zeros, GTPOConfig(entropy_axis=axis, entropy_floor=floor, **BONUS_ALONE))
    assert torch.equal(weights[batch_mask(zeros)], torch.ones(5, dtype=torch.float64))
    config = GTPOConfig(entropy_axis=axis, entropy_floor=floor, advantage_pool="per_set", one_sided_groups="keep")
    assert not assign_credit(config, **zeros.arguments()).advantages.any()  # a constant pool


def test_zeros_of_wrong_responses_matter_only_where_they_are_inverted() -> None:
    batch = Batch([[1.0, 3.0], [3.0, 3.0], [0.0, 1.0]], [1, 1, 0], [0] * 3)
    for config in (GTPOConfig(formulation="v1", entropy_floor=0.0), GRPOSConfig(formulation="v1", entropy_floor=0.0)):
        shaped = assign_credit(config, **batch.arguments()).shaped_rewards
        assert not shaped[2].any()
        assert float(shaped[0, 0]) == pytest.approx(1.05 if isinstance(config, GTPOConfig) else 1.08)


def test_narrow_pools_keep_their_digits() -> None:
    """Entropies within 1e-4 of each other: the advantages of ``per_set`` see nothing but the difference.

    Weights have 32 significant bits, so weights are good to 1.2e-10, of a std of 3e-5 that is 4e-6.
    """
    generator = torch.Generator().manual_seed(0)
    rows = (1 + 1e-4 * torch.rand(8, 50, generator=generator)).tolist()
    batch = Batch(rows, [1.0] * 4 + [0.0] * 4, [0] * 8)
    exact = exact_weights(batch, GTPOConfig(entropy_floor=0.0))
    for scope in ("batch", "group"):
        config = GTPOConfig(entropy_floor=0.0, advantage_pool="per_set", advantage_scope=scope)
        found = assign_credit(config, **batch.arguments()).advantages.double()
        for rows_of_side, got, sign in ((exact[:4], found[:4], 1), (exact[4:], found[4:], -1)):
            wanted = sign * (rows_of_side - rows_of_side.mean()) / rows_of_side.std(correction=0)
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)


# ------------------------------------------------------------------------------------- geometric weights beyond float32
MESSAGE = (
    r"^token_entropy: an entropy weight is 1e\+38, expected at most 2\*\*100 with entropy_mean='geometric'; "
    r"set entropy_clip"
)
FAR_APART = Batch([[1e-38], [1e38], [1.0]], [1, 1, 0], [0] * 3)  # each is 1e38 times, or 1e-38 times, their mean


@pytest.mark.parametrize(
    "config",
    [
        GTPOConfig(entropy_mean="geometric", entropy_floor=0.0),
        GTPOConfig(entropy_mean="geometric", entropy_floor=0.0, entropy_axis="matrix", entropy_scope="batch"),
        GRPOSConfig(entropy_mean="geometric", entropy_floor=0.0),
    ],
)
def test_geometric_weights_beyond_float32_are_refused(config: GTPOConfig) -> None:
    """They are not bounded by the number of terms."""
    with pytest.raises(DataError, match=MESSAGE):
        assign_credit(config, **FAR_APART.arguments())
    bounded = type(config)(entropy_mean="geometric", entropy_clip=(1e-20, 1e20))
    assert assign_credit(bounded, **FAR_APART.arguments()).advantages.isfinite().all()
    near = Batch([[1e-20], [1e20], [1e-38]], [1, 1, 0], [0] * 3)  # alone, any entropy has weight 1
    assert assign_credit(config, **near.arguments()).advantages.isfinite().all()


def test_the_largest_geometric_weight_is_a_number_of_credit() -> None:
    for factor in (0.99, 1.01):
        weights = [1 / (factor * LARGEST_WEIGHT), factor * LARGEST_WEIGHT]
        if factor < 1:
            assert relative(weights, "geometric")[1] == pytest.approx(factor * LARGEST_WEIGHT, rel=1e-6)
        else:
            with pytest.raises(DataError, match="an entropy weight is 1.28e"):
                relative(weights, "geometric")
