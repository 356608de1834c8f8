"""Shares of entropies that span many orders of magnitude, against exact fractions."""

import math
from fractions import Fraction

import pytest
import torch
from gtpo_megatron.algorithms.share_grid import ShareRule
from torch import Tensor

from gtpo_megatron.algorithms import assign_credit
from gtpo_megatron.config.algorithm import GRPOSConfig, GTPOConfig
from gtpo_megatron.errors import DataError
from tests.strategies import Batch
from tests.unit.algorithms.test_shares import shares_of

FLOAT32 = 2.0**-24
"""Relative rounding of a float32 share."""


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


def exact_shares(batch: Batch, rule: ShareRule) -> Tensor:
    """In rational numbers."""
    entropies = batch.arguments()["token_entropy"].tolist()
    lengths, rewards, groups = batch.lengths.tolist(), batch.rewards, batch.groups
    floor = Fraction(rule.floor)
    weight = [
        [Fraction(h) + floor if rewards[i] else 1 / (Fraction(h) + floor) for h in row[: lengths[i]]]
        for i, row in enumerate(entropies)
    ]
    everyone = range(len(weight))
    result = torch.zeros(len(weight), max(lengths), dtype=torch.float64)
    totals: dict[tuple, tuple[Fraction, int]] = {}
    for i in everyone:
        for t in range(lengths[i]):
            key = (rewards[i], 0 if rule.spans_batch else groups[i])
            key += {"position": (t,), "matrix": (), "response": (i,)}[rule.axis]
            if key not in totals:
                peers = [
                    k for k in everyone if rewards[k] == rewards[i] and (rule.spans_batch or groups[k] == groups[i])
                ]
                column = {
                    "position": lambda t=t, p=peers: [weight[k][t] for k in p if lengths[k] > t],
                    "matrix": lambda p=peers: [w for k in p for w in weight[k]],
                    "response": lambda i=i: weight[i],
                }[rule.axis]()
                totals[key] = (sum(column, Fraction()), len(column))
            total, count = totals[key]
            result[i, t] = float(weight[i][t] / total * count)
    return result


@pytest.mark.parametrize("spans_batch", [False, True])
@pytest.mark.parametrize("axis", ["position", "matrix", "response"])
@pytest.mark.parametrize(
    ("floor", "smallest", "largest"),
    [(1e-8, 1e-6, 12.0), (1e-12, 1e-10, 12.0), (1e-20, 1e-20, 12.0), (1e-30, 1e-25, 1e30), (1e-45, 1e-38, 1e38)],
)
def test_shares_are_right_whatever_the_range(
    axis: str, spans_batch: bool, floor: float, smallest: float, largest: float
) -> None:
    batch = wide_batch(1, group_size=9, max_tokens=40, smallest=smallest, largest=largest)
    rule = ShareRule(axis=axis, spans_batch=spans_batch, floor=floor, may_be_narrow=False)
    shares = shares_of(batch, rule)
    mask = batch.arguments()["response_mask"]
    wanted = exact_shares(batch, rule)
    error = ((shares.values.double() - wanted).abs() / wanted.clamp(min=1e-37))[mask]
    assert float(error.max()) < 2 * FLOAT32
    # the mean share of each comparison is 1: to float64 rounding, not to float32's
    count = float(mask.sum())
    assert abs(float(shares.total.sum()) / count - 1) < 1e-12
    assert shares.total.tolist() == pytest.approx(torch.where(mask, wanted, 0.0).sum(1).tolist(), rel=1e-7)
    narrow = shares_of(batch, ShareRule(axis=axis, spans_batch=spans_batch, floor=floor))
    assert float((narrow.values.double() - (wanted - 1)).abs()[mask].max()) < 2 * FLOAT32 * float(wanted.max())


def test_a_long_matrix_keeps_its_digits() -> None:
    """16 x 1,024 tokens at a floor of 1e-12, where one grid for the whole matrix was 0.4% off."""
    batch = wide_batch(2, group_size=16, max_tokens=1024, smallest=1e-9, largest=8.0)
    shares = shares_of(batch, ShareRule(axis="matrix", floor=1e-12, may_be_narrow=False)).values.double()
    arguments = batch.arguments()
    raised = arguments["token_entropy"].double() + 1e-12
    for group in (0, 1):
        for is_correct in (True, False):
            rows = (arguments["group_ids"] == group) & ((arguments["rewards"] > 0.5) == is_correct)
            of_set = raised[rows][arguments["response_mask"][rows]]
            weights = of_set if is_correct else 1 / of_set
            wanted = weights / math.fsum(weights.tolist()) * len(weights)
            found = shares[rows][arguments["response_mask"][rows]]
            assert float(((found - wanted).abs() / wanted).max()) < 2 * FLOAT32


def test_one_extreme_token_ruins_no_other_position() -> None:
    tiny = Batch([[1e-20, 0.5], [1.0, 2.0]], [0, 0], [0, 0])
    shares = shares_of(tiny, ShareRule(floor=0.0, may_be_narrow=False)).values
    torch.testing.assert_close(shares, torch.tensor([[2.0, 1.6], [2e-20, 0.4]]), rtol=1e-6, atol=0)
    huge = Batch([[1e30, 0.5], [1.0, 2.0], [1.0, 1.0]], [1, 1, 0], [0] * 3)
    config = GTPOConfig(formulation="v1", entropy_floor=0.0)
    shaped = assign_credit(config, **huge.arguments()).shaped_rewards
    torch.testing.assert_close(shaped[:2], torch.tensor([[1.2, 1.04], [1.0, 1.16]]))


@pytest.mark.parametrize("floor", [1e-8, 1e-16, 1e-30, 0.0])
@pytest.mark.parametrize("axis", ["position", "matrix", "response"])
def test_lone_tokens_and_columns_of_zeros_have_share_one(axis: str, floor: float) -> None:
    batch = Batch([[0.3], [7.0, 1e-9]], [0, 1], [0, 1])
    if axis == "position":
        shares = shares_of(batch, ShareRule(axis=axis, floor=floor))
        assert float(shares.values[batch_mask(batch)].abs().max()) < 5e-16  # above or below 1
    zeros = Batch([[0.0, 0.0], [0.0, 0.0], [0.0]], [1, 1, 1], [0, 0, 0])
    shares = shares_of(zeros, ShareRule(axis=axis, floor=floor))
    assert float(shares.values[batch_mask(zeros)].abs().max()) < 5e-16
    config = GTPOConfig(entropy_axis=axis, entropy_floor=floor, advantage_pool="per_set", one_sided_groups="keep")
    assert not assign_credit(config, **zeros.arguments()).advantages.any()  # a constant pool


def batch_mask(batch: Batch) -> Tensor:
    return batch.arguments()["response_mask"]


def test_zeros_of_wrong_responses_matter_only_where_they_are_inverted() -> None:
    batch = Batch([[1.0, 3.0], [3.0, 3.0], [0.0, 1.0]], [1, 1, 0], [0] * 3)
    for config in (GTPOConfig(formulation="v1", entropy_floor=0.0), GRPOSConfig(formulation="v1", entropy_floor=0.0)):
        shaped = assign_credit(config, **batch.arguments()).shaped_rewards
        assert not shaped[2].any()
        assert float(shaped[0, 0]) == pytest.approx(1.05 if isinstance(config, GTPOConfig) else 1.08)


@pytest.mark.parametrize("entropies", [[[1e-20], [1e20]], [[1e-38, 1e-38], [1e-38]], [[0.5], [1e35]]])
def test_geometric_shares_beyond_float32_are_refused(entropies: list[list[float]]) -> None:
    """They are not bounded by the number of terms, and 1e40 is no float32."""
    config = GTPOConfig(entropy_mean="geometric", entropy_floor=0.0)
    arguments = Batch(entropies, [1, 0], [0, 0]).arguments()
    if float(arguments["token_entropy"][1, 0]) < 1:
        assert assign_credit(config, **arguments).advantages.isfinite().all()
    else:
        with pytest.raises(DataError, match="token_entropy of response 1 of the batch contains 1.*set entropy_clip"):
            assign_credit(config, **arguments)


def test_response_entropies_of_any_range() -> None:
    batch = Batch([[1e-30], [1e-10, 1e-10], [1.0], [1e30]], [1, 1, 0, 0], [0] * 4)
    shaped = assign_credit(GRPOSConfig(entropy_floor=0.0), **batch.arguments()).shaped_rewards[:, 0]
    torch.testing.assert_close(shaped, torch.tensor([1.0, 1.2, -1.2, -1.0]))


def test_narrow_pools_keep_their_digits() -> None:
    """Entropies within 1e-4 of each other: the advantages of ``per_set`` see nothing but the difference."""
    generator = torch.Generator().manual_seed(0)
    rows = (1 + 1e-4 * torch.rand(8, 50, generator=generator)).tolist()
    batch = Batch(rows, [1.0] * 4 + [0.0] * 4, [0] * 8)
    exact = exact_shares(batch, ShareRule(floor=0.0))
    for axis_rule in ("batch", "group"):
        config = GTPOConfig(entropy_floor=0.0, advantage_pool="per_set", advantage_scope=axis_rule)
        found = assign_credit(config, **batch.arguments()).advantages.double()
        for rows_of_side, sign in ((exact[:4], 1), (exact[4:], -1)):
            wanted = sign * (rows_of_side - rows_of_side.mean()) / rows_of_side.std(correction=0)
            got = found[:4] if sign == 1 else found[4:]
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6)
