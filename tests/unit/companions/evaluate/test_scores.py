import itertools
import random

import pytest
import torch

from gtpo_megatron.batch import Problem, RewardBatch
from gtpo_megatron.companions.evaluate.scores import score, vote
from gtpo_megatron.config.problems import EvaluationConfig
from gtpo_megatron.evaluation.evaluator import HeldOutSet, evaluate
from tests.unit.companions.evaluate.makers import graded


def problem(name, reference, *rows):
    return [graded(name, sample, reference=reference, **row) for sample, row in enumerate(rows)]


RIGHT = {"reward": 1.0, "answer": "7"}
ALSO_RIGHT = {"reward": 1.0, "answer": r"\frac{14}{2}"}
WRONG = {"reward": 0.0, "answer": "8"}
SILENT = {"reward": 0.0, "answer": None, "is_truncated": True, "num_tokens": 9}
FAILED = {"reward": 0.0, "failure": "took longer than 1 s", "answer": "7"}
PROBLEMS = [
    problem("a", "7", RIGHT, WRONG, WRONG, SILENT),
    problem("b", "7", RIGHT, ALSO_RIGHT, WRONG, FAILED),
    problem("c", "7", SILENT, SILENT, WRONG, WRONG),
]


PROBLEM = Problem(problem_id="a", prompt_ids=(1,), answer="7")


def mean(found, figure):
    return found.intervals[figure].mean


def scores(**changes):
    return score(PROBLEMS, **{"ks": (1, 2, 4), "threshold": 0.5, "seed": 0, "has_answers": True} | changes)


def test_figures_by_hand():
    found = scores()
    assert mean(found, "mean@4") == mean(found, "reward") == pytest.approx((1 / 4 + 2 / 4 + 0) / 3)
    # without replacement: a 1 - C(3,2)/C(4,2), b 1 - C(2,2)/C(4,2), c 0
    assert mean(found, "pass@2") == pytest.approx((1 / 2 + 5 / 6 + 0) / 3)
    assert mean(found, "pass@4") == pytest.approx(2 / 3)
    # with replacement: 1 - (share wrong)^2
    assert mean(found, "best@2") == pytest.approx((1 - (3 / 4) ** 2 + 1 - (2 / 4) ** 2 + 0) / 3)
    assert found.truncated_frac == pytest.approx(3 / 12)
    assert found.response_tokens_mean == pytest.approx((3 * 9 + 9) / 12)
    assert found.num_failed == 1
    assert found.intervals["mean@4"].low <= mean(found, "mean@4") <= found.intervals["mean@4"].high


def test_maj_at_k_of_one_is_the_mean_and_correct_answers_vote_together():
    found = scores()
    assert mean(found, "maj@1") == pytest.approx(mean(found, "mean@4"), abs=0.03)
    # b: two spellings of the right answer outvote one wrong one and a failed response that says the same as they do;
    # brute force over all draws of four
    votes = ["7", "7", "wrong: 8", "wrong: 7"]
    rewards = {"7": 1.0, "wrong: 8": 0.0, "wrong: 7": 0.0}
    total = 0.0
    for draw in itertools.product(votes, repeat=4):
        winner = max(draw, key=lambda v: (draw.count(v), -draw.index(v)))
        total += rewards[winner]
    assert found.per_problem["maj@4"][1] == pytest.approx(total / 4**4, abs=0.05)


def test_votes_of_incorrect_responses():
    assert vote(graded(answer=r"$ \dfrac{1}{2} $.")) == r"incorrect: \frac{1}{2}"
    assert vote(graded(answer=None)) is None
    assert vote(graded(answer="  ")) is None


def test_problems_keep_their_own_figures_in_order():
    found = scores()
    assert [entry["problem_id"] for entry in found.problems] == ["a", "b", "c"]
    assert [entry["num_correct"] for entry in found.problems] == [1, 2, 0]
    assert [entry["num_failed"] for entry in found.problems] == [0, 1, 0]
    assert [entry["num_truncated"] for entry in found.problems] == [1, 0, 2]
    assert found.per_problem["pass@2"][0] == pytest.approx(1 / 2)


def test_rewards_between_nought_and_one():
    partly = [problem("a", "7", {"reward": 0.25}, {"reward": 0.75})]
    found = score(partly, ks=(2,), threshold=0.5, seed=0, has_answers=False)
    assert mean(found, "mean@2") == pytest.approx(0.5)
    assert mean(found, "reward") == pytest.approx(0.5)
    assert mean(found, "best@2") == pytest.approx((0.25 + 3 * 0.75) / 4)
    assert mean(found, "pass@2") == 1.0
    assert "maj@2" not in found.intervals
    assert "maj@2" not in found.per_problem


@pytest.mark.parametrize("rewards", [(1.0, -1.0, -1.0, -1.0), (0.9, 0.4, 0.0, 0.0)])
def test_mean_at_k_is_the_share_of_correct_responses_as_it_is_during_training(rewards):
    one = problem("a", "7", *({"reward": reward} for reward in rewards))
    found = score([one], ks=(4,), threshold=0.5, seed=0, has_answers=False)
    assert mean(found, "mean@4") == 0.25
    assert mean(found, "reward") == pytest.approx(sum(rewards) / 4)
    assert found.per_problem["mean@4"][0] == 0.25
    assert found.per_problem["reward"][0] == pytest.approx(sum(rewards) / 4)
    batch = RewardBatch(rewards=torch.tensor(rewards), failed=torch.zeros(4, dtype=torch.bool))
    heldout = HeldOutSet(label="heldout", problems=[PROBLEM])
    training = evaluate(heldout, EvaluationConfig(path="x", samples=4), lambda _: batch, threshold=0.5)
    assert training.mean_at_k == mean(found, "mean@4")


def test_a_reward_that_reaches_the_threshold_in_float32_is_correct_as_in_training():
    """Eight tenths of a reward, added up in float64, are one unit in the last place short of 0.8."""
    rewards = [sum([0.1] * 8), 0.8, 0.7999, 0.0]
    assert rewards[0] < 0.8
    one = problem("a", "7", *({"reward": reward} for reward in rewards))
    assert score([one], ks=(4,), threshold=0.8, seed=0, has_answers=False).intervals["mean@4"].mean == 0.5
    batch = RewardBatch(rewards=torch.tensor(rewards), failed=torch.zeros(4, dtype=torch.bool))
    heldout = HeldOutSet(label="heldout", problems=[PROBLEM])
    training = evaluate(heldout, EvaluationConfig(path="x", samples=4), lambda _: batch, threshold=0.8)
    assert training.mean_at_k == 0.5


def test_the_same_seed_gives_the_same_scores():
    assert scores().intervals == scores().intervals != scores(seed=1).intervals


def test_figures_and_intervals_are_those_of_before_the_verdict_file():
    """Fixed numbers: of an evaluation that was scored by an earlier state of this code."""
    rng = random.Random(7)
    rows = []
    for i in range(12):
        samples = ({"reward": float(rng.random() < i / 14), "answer": rng.choice("789")} for _ in range(6))
        rows.append(problem(f"x-{i}", "7", *samples))
    found = score(rows, ks=(2, 6), threshold=0.5, seed=3, has_answers=True)
    assert {name: (one.mean, one.low, one.high) for name, one in found.intervals.items()} == {
        "mean@6": (0.3888888888888889, 0.20833333333333334, 0.5694444444444444),
        "reward": (0.3888888888888889, 0.20833333333333334, 0.5694444444444444),
        "pass@2": (0.55, 0.31666666666666665, 0.7666666666666667),
        "pass@6": (0.6666666666666666, 0.4166666666666667, 0.9166666666666666),
        "best@2": (0.5231481481481481, 0.2986111111111111, 0.7384259259259259),
        "best@6": (0.648123142432556, 0.3981285008001829, 0.8955171896433471),
        "maj@2": (0.3934166666666667, 0.21091666666666667, 0.5751666666666666),
        "maj@6": (0.44825, 0.23466666666666666, 0.6626791666666665),
    }
