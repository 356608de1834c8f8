"""Held-out accuracy from verdicts."""

import pytest
import torch

from gtpo_megatron.batch import Problem, RewardBatch
from gtpo_megatron.config.problems import EvaluationConfig
from gtpo_megatron.errors import RolloutError
from gtpo_megatron.evaluation.evaluator import HeldOutSet, evaluate

PROBLEMS = [Problem(problem_id=str(i), prompt_ids=(1,), answer="1") for i in range(4)]


def measure(verdicts, failed=(), label="heldout", threshold=0.5, parts=None):
    seen = []

    def sample_and_grade(prompts):
        seen.append(prompts)
        return RewardBatch(
            rewards=torch.tensor(verdicts),
            failed=torch.tensor([i in failed for i in range(len(verdicts))]),
            parts=parts or {},
        )

    heldout = HeldOutSet(label=label, problems=PROBLEMS)
    result = evaluate(heldout, EvaluationConfig(path="x", samples=2), sample_and_grade, threshold=threshold)
    assert seen[0].group_ids == (0, 1, 2, 3)
    return result


def test_accuracy_by_hand():
    result = measure([1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.5, 0.4])
    assert result.mean_at_k == pytest.approx((1 + 0.5 + 0 + 0.5) / 4)
    assert result.pass_at_k == pytest.approx(3 / 4)
    assert result.interval[0] < result.mean_at_k < result.interval[1]
    assert result.metrics()["eval/heldout_failed_count"] == 0
    # with replacement from (1, 1), (1, 0), (0, 0), (0.5, 0.4), by reward rather than verdict
    hit = 1 - 0.5**16
    assert result.best_at[16] == pytest.approx((1 + hit + 0 + 0.4 + 0.1 * hit) / 4)
    assert result.metrics()["eval/heldout_best_at_32"] == result.best_at[32] > result.best_at[16]
    assert "held-out mean@2 50.0%" in str(result)


def test_a_response_without_a_verdict_counts_as_wrong_and_is_counted():
    result = measure([1.0] * 8, failed=(0, 1, 2))
    assert result.mean_at_k == pytest.approx((0 + 0.5 + 1 + 1) / 4)
    assert (result.num_failed, result.num_ungraded) == (3, 0)


def test_an_episode_that_a_limit_ended_before_it_was_graded_is_counted():
    ended = torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, torch.nan, 0.0, 0.0])
    assert measure([0.0] * 8, failed=(0,), parts={"ended_ungraded": ended}).num_ungraded == 2


def test_without_any_verdict_there_is_no_accuracy():
    with pytest.raises(RolloutError, match=r"no verdict on any of 8 responses to heldout problems; log\.txt"):
        measure([0.0] * 8, failed=range(8))


@pytest.mark.parametrize("threshold", [0.7, 0.9])
def test_a_reward_equal_to_the_threshold_is_correct_as_in_training(threshold):
    result = measure([threshold, threshold - 0.05] * 4, threshold=threshold)
    assert result.mean_at_k == 0.5


def test_metrics_go_by_the_label_of_the_set():
    result = measure([1.0] * 8, label="aime24")
    assert set(result.metrics()) == {
        f"eval/aime24_{what}"
        for what in (
            "mean_at_k",
            "interval_low",
            "interval_high",
            "pass_at_k",
            "failed_count",
            "best_at_32",
            "best_at_16",
        )
    }
    assert str(result).startswith("aime24 mean@2 100.0%")
