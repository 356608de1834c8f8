"""Diagnostics by hand."""

import pytest
import torch

from gtpo_megatron.algorithms import assign_credit
from gtpo_megatron.config.algorithm import GRPOConfig, GRPOSConfig, GTPOConfig
from tests.strategies import Batch

# group 0: 15 correct of 16 would flip signs; here a strong bonus does. Group 1 is all correct, group 2 has no tokens.
BATCH = Batch([[0.1, 4.0, 1.0], [3.9], [1.0, 3.0], [2.0], []], [1, 1, 0, 1, 0], [0, 0, 0, 1, 2])


def test_metrics_by_hand() -> None:
    config = GTPOConfig(alpha1=0.1, alpha2=1.0, one_sided_groups="keep", entropy_floor=0.0)
    credit = assign_credit(config, **BATCH.arguments())
    metrics = credit.metrics
    correct = credit.advantages[[0, 1, 3]][BATCH.arguments()["response_mask"][[0, 1, 3]]]
    wrong = credit.advantages[2, :2]
    assert metrics["credit/correct_tokens_negative_frac"] == pytest.approx(float((correct < 0).double().mean()))
    assert 0 < metrics["credit/correct_tokens_negative_frac"] < 1
    assert metrics["credit/incorrect_tokens_positive_frac"] == float((wrong > 0).double().mean())
    assert metrics["credit/one_sided_groups_frac"] == 0.5
    assert metrics["credit/singleton_position_frac"] == pytest.approx(3 / 5)  # two of group 0, one of group 1
    assert metrics["credit/entropy_correct_nats"] == pytest.approx(11.0 / 5, rel=1e-6)
    assert metrics["credit/entropy_incorrect_nats"] == pytest.approx(2.0)
    x = [0.05, 1.0, 1.0, 1.95, 1.0]
    assert metrics["credit/effective_frac_correct"] == pytest.approx(sum(x) ** 2 / 5 / sum(v * v for v in x), rel=1e-6)
    assert metrics["credit/effective_frac_incorrect"] == pytest.approx(1.0)


LONE = "credit/singleton_position_frac"


def test_lone_survivors_are_those_of_the_comparison_that_is_made() -> None:
    batch = Batch([[1.0, 2.0, 3.0], [2.0], [1.0]], [1, 1, 0], [0, 1, 0])  # one correct response a group
    assert assign_credit(GTPOConfig(), **batch.arguments()).metrics[LONE] == 1
    arguments = batch.arguments()
    over_batch = assign_credit(GTPOConfig(entropy_scope="batch", one_sided_groups="keep"), **arguments)
    assert over_batch.metrics[LONE] == 2 / 4
    shares = 10 * (over_batch.shaped_rewards - 1)  # the default's alpha2 is 0.1
    assert shares[0].tolist() == pytest.approx([2 / 3, 1, 1], rel=1e-5)
    assert shares[1, 0] == pytest.approx(4 / 3, rel=1e-5)
    for axis in ("response", "matrix"):  # the second response has one token, which is its whole comparison
        assert assign_credit(GTPOConfig(entropy_axis=axis), **arguments).metrics[LONE] == 1 / 4
    whole = assign_credit(GTPOConfig(entropy_axis="matrix", entropy_scope="batch"), **arguments)
    assert whole.metrics[LONE] == 0
    assert assign_credit(GRPOSConfig(), **arguments).metrics[LONE] == 1
    assert assign_credit(GRPOSConfig(entropy_scope="batch"), **arguments).metrics[LONE] == 0


@pytest.mark.parametrize("axis", ["position", "response", "matrix"])
def test_tokens_that_are_not_compared_are_no_survivors(axis: str) -> None:
    batch = Batch([[1.0, 2.0], [2.0, 3.0], [1.0, 1.0]], [1, 1, 0], [0] * 3)
    kept = torch.tensor([[True, False], [False, False], [True, True]])
    metrics = assign_credit(GTPOConfig(entropy_axis=axis), **batch.arguments(), shaped_tokens=kept).metrics
    assert metrics[LONE] == 1 / 4  # one of the four correct tokens is compared, and only with itself


def test_sequence_level_shares_count_responses() -> None:
    metrics = assign_credit(GRPOSConfig(entropy_floor=0.0), **BATCH.arguments()).metrics
    x = [2 * 1.7 / 5.6, 2 * 3.9 / 5.6, 1.0]
    assert metrics["credit/effective_frac_correct"] == pytest.approx(9 / 3 / sum(v * v for v in x), rel=1e-6)


def test_algorithms_without_shares_and_empty_sets_leave_them_out() -> None:
    metrics = assign_credit(GRPOConfig(), **BATCH.select([3]).arguments()).metrics
    assert sorted(metrics) == [
        "credit/correct_tokens_negative_frac",
        "credit/entropy_correct_nats",
        "credit/one_sided_groups_frac",
    ]
    assert assign_credit(GTPOConfig(), **BATCH.select([4]).arguments()).metrics == {}


def test_the_effective_fraction_of_geometric_means() -> None:
    """Their mean is not 1: one tiny weight of four leaves three quarters effective."""
    batch = Batch([[1e-8], [1.0], [1.0], [1.0], [1.0]], [1, 1, 1, 1, 0], [0] * 5)
    for config in (GTPOConfig, GRPOSConfig):
        metrics = assign_credit(config(entropy_mean="geometric", entropy_floor=0.0), **batch.arguments()).metrics
        assert metrics["credit/effective_frac_correct"] == pytest.approx(0.75, rel=1e-6)
