import logging
import time

import pytest
import torch

from gtpo_megatron.errors import ConfigError, ShapeError
from gtpo_megatron.rewards.reward import RewardScorer

MATH = "gtpo_megatron.rewards.math_answer:math_answer"
OBEY = "tests.unit.rewards.reward_functions:obey"
RESPONSES = [r"\boxed{1}", r"\boxed{\frac{4}{2}}", "none", r"\boxed{9}"]
ANSWERS = ["1", "2", "3", ""]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_grading_here_and_in_workers_gives_the_same_batch(num_workers, caplog):
    with RewardScorer(MATH, num_workers=num_workers, timeout_s=20.0) as scorer, caplog.at_level(logging.WARNING):
        batch = scorer.score(RESPONSES, ANSWERS)
    assert torch.equal(batch.rewards, torch.tensor([1.0, 1.0, 0.0, 0.0]))
    assert torch.equal(batch.failed, torch.tensor([False, False, False, True]))
    assert "1 of 4 responses have no reward: 1 x DataError: the reference answer is empty" in caplog.text


def test_a_reward_that_raises_is_failed_and_never_a_silent_zero():
    with RewardScorer(OBEY, num_workers=0, timeout_s=1.0) as scorer:
        batch = scorer.score(["fine", "raise x"], ["", ""])
    assert batch.failed.tolist() == [False, True]
    assert batch.rewards.tolist() == [1.0, 0.0]


def test_an_empty_batch_is_legal():
    with RewardScorer(OBEY, num_workers=0, timeout_s=1.0) as scorer:
        assert scorer.score([], []).rewards.shape == (0,)


def test_responses_and_answers_must_pair_up():
    with RewardScorer(OBEY, num_workers=0, timeout_s=1.0) as scorer, pytest.raises(ShapeError, match="2 responses"):
        scorer.score(["a", "b"], ["a"])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_wrong_name_fails_before_anything_is_sampled(num_workers):
    with pytest.raises(ConfigError, match="nope"):
        RewardScorer("gtpo_megatron.rewards.math_answer:nope", num_workers=num_workers, timeout_s=5.0)


def test_an_expression_that_hangs_the_solver_costs_its_limit_once():
    tower = r"\boxed{9^{9^{9^{9}}}+1}"
    with RewardScorer(MATH, num_workers=2, timeout_s=8.0) as scorer:
        start = time.monotonic()
        batch = scorer.score([tower, *[r"\boxed{\frac12}"] * 50], ["4", *["0.5"] * 50])
        assert time.monotonic() - start < 15.0
    assert batch.rewards.tolist() == [0.0] + [1.0] * 50
    assert batch.failed.tolist() == [True] + [False] * 50
