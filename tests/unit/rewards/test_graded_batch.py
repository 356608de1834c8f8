"""Verdicts of a pool as the rewards of a batch, with workers and without."""

import logging
import time

import pytest
import torch

from gtpo_megatron.config.reward import RewardConfig
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.orchestration.stages.grading import reward_batch
from gtpo_megatron.rewards.request import RewardRequest
from gtpo_megatron.rewards.reward_pool import RewardPool

MATH = "gtpo_megatron.rewards.math_answer:math_answer"
OBEY = "tests.unit.rewards.reward_functions:obey"
ECHO = "tests.unit.rewards.reward_functions:echo"
RESPONSES = [r"\boxed{1}", r"\boxed{\frac{4}{2}}", "none", r"\boxed{9}"]
ANSWERS = ["1", "2", "3", ""]


def rows(responses, answers=None):
    answers = answers or [""] * len(responses)
    return [RewardRequest(response=one, answer=answer) for one, answer in zip(responses, answers, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_grading_here_and_in_workers_gives_the_same_batch(num_workers, caplog):
    with (
        RewardPool(RewardConfig(function=MATH, num_workers=num_workers, timeout_s=20.0)) as pool,
        caplog.at_level(logging.WARNING),
    ):
        batch = reward_batch(pool.grade(rows(RESPONSES, ANSWERS)))
    assert torch.equal(batch.rewards, torch.tensor([1.0, 1.0, 0.0, 0.0]))
    assert torch.equal(batch.failed, torch.tensor([False, False, False, True]))
    assert "1 of 4 responses have no reward: 1 x DataError: the reference answer is empty" in caplog.text
    assert batch.commonest_failure.startswith("1 x DataError: the reference answer is empty")


def test_a_reward_that_raises_is_failed_and_never_a_silent_zero():
    with RewardPool(RewardConfig(function=OBEY, num_workers=0, timeout_s=1.0)) as pool:
        batch = reward_batch(pool.grade(rows(["fine", "raise x"])))
    assert batch.failed.tolist() == [False, True]
    assert batch.rewards.tolist() == [1.0, 0.0]


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("number", ["1e308", "-1e308", "1000001", "inf", "nan"])
def test_a_reward_beyond_its_bound_is_no_verdict_and_its_row_is_named(num_workers, number, caplog):
    with (
        RewardPool(RewardConfig(function=ECHO, num_workers=num_workers, timeout_s=20.0)) as pool,
        caplog.at_level(logging.WARNING),
    ):
        batch = reward_batch(pool.grade(rows(["1", "1e6", number, "-1e6"])))
    assert batch.failed.tolist() == [False, False, True, False]
    assert batch.rewards.tolist() == [1.0, 1e6, 0.0, -1e6]
    assert "1 of 4 responses have no reward: 1 x DataError: the reward function returned" in caplog.text
    assert "(row 2)" in caplog.text


@pytest.mark.slow
def test_rows_that_hang_leave_the_others_their_verdicts(caplog):
    """Five rows that hang, at ten seconds each, are more than the batch may take; all the others are graded."""
    responses = ["hang", "fine", "fine"] * 5
    with RewardPool(RewardConfig(function=OBEY, num_workers=1, timeout_s=10.0)) as pool:
        start = time.monotonic()
        with caplog.at_level(logging.WARNING):
            batch = reward_batch(pool.grade(rows(responses), budget_s=24.0))
        assert time.monotonic() - start < 26.0
    assert batch.failed.tolist() == [row == "hang" for row in responses]
    assert batch.num_over_budget == 4
    assert "x no time left: " in caplog.text


def test_an_empty_batch_is_legal():
    with RewardPool(RewardConfig(function=OBEY, num_workers=0, timeout_s=1.0)) as pool:
        assert reward_batch(pool.grade([])).rewards.shape == (0,)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_wrong_name_fails_before_anything_is_sampled(num_workers):
    with pytest.raises(ConfigError, match="nope"):
        RewardPool(
            RewardConfig(function="gtpo_megatron.rewards.math_answer:nope", num_workers=num_workers, timeout_s=5.0)
        )


@pytest.mark.slow
def test_an_expression_that_hangs_the_solver_costs_its_limit_once():
    tower = r"\boxed{9^{9^{9+9^{9}}}+1}"  # a sum in the exponent: only the clock finds it
    with RewardPool(RewardConfig(function=MATH, num_workers=2, timeout_s=8.0)) as pool:
        start = time.monotonic()
        batch = reward_batch(pool.grade(rows([tower, *[r"\boxed{\frac12}"] * 50], ["4", *["0.5"] * 50])))
        assert time.monotonic() - start < 15.0
    assert batch.rewards.tolist() == [0.0] + [1.0] * 50
    assert batch.failed.tolist() == [True] + [False] * 50
