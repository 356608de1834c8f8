import itertools

import pytest
import torch

from gtpo_megatron.batch import Problem, RewardBatch
from gtpo_megatron.config.evaluation import EvaluationConfig
from gtpo_megatron.evaluation.evaluator import HeldOutSet, evaluate
from gtpo_megatron.evaluation.scores import ProblemResponses, mean_so_far, score, vote
from tests.unit.evaluation.makers import graded


def problem(name, reference, *rows):
    return ProblemResponses(
        problem=Problem(problem_id=name, prompt_ids=(1,), answer=reference),
        responses=[graded(name, sample, **row) for sample, row in enumerate(rows)],
    )


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


def scores(**changes):
    return score(PROBLEMS, **{"ks": (1, 2, 4), "threshold": 0.5, "seed": 0, "has_answers": True} | changes)


def test_figures_by_hand():
    found = scores()
    assert found.mean_at_k.mean == found.mean_reward.mean == pytest.approx((1 / 4 + 2 / 4 + 0) / 3)
    # without replacement: a 1 - C(3,2)/C(4,2), b 1 - C(2,2)/C(4,2), c 0
    assert found.pass_at_k[2].mean == pytest.approx((1 / 2 + 5 / 6 + 0) / 3)
    assert found.pass_at_k[4].mean == pytest.approx(2 / 3)
    # with replacement: 1 - (share wrong)^2
    assert found.best_at_k[2].mean == pytest.approx((1 - (3 / 4) ** 2 + 1 - (2 / 4) ** 2 + 0) / 3)
    assert found.truncated_frac == pytest.approx(3 / 12)
    assert found.response_tokens_mean == pytest.approx((3 * 9 + 9) / 12)
    assert found.num_failed == 1
    assert found.mean_at_k.low <= found.mean_at_k.mean <= found.mean_at_k.high


def test_maj_at_k_of_one_is_the_mean_and_correct_answers_vote_together():
    found = scores()
    assert found.maj_at_k[1].mean == pytest.approx(found.mean_at_k.mean, abs=0.03)
    # b: two spellings of the right answer outvote one wrong one and a failed response that says the same as they do;
    # brute force over all draws of four
    votes = ["7", "7", "wrong: 8", "wrong: 7"]
    rewards = {"7": 1.0, "wrong: 8": 0.0, "wrong: 7": 0.0}
    total = 0.0
    for draw in itertools.product(votes, repeat=4):
        winner = max(draw, key=lambda v: (draw.count(v), -draw.index(v)))
        total += rewards[winner]
    assert found.per_problem[1]["maj_at_k"]["4"] == pytest.approx(total / 4**4, abs=0.05)


def test_votes():
    assert vote(graded(answer="anything"), "7", is_correct=True) == "7"
    assert vote(graded(answer=r"$ \dfrac{1}{2} $."), "7", is_correct=False) == r"wrong: \frac{1}{2}"
    assert vote(graded(answer=None), "7", is_correct=False) is None
    assert vote(graded(answer="  "), "7", is_correct=False) is None


def test_problems_keep_their_own_figures_in_order():
    found = scores()
    assert [entry["problem_id"] for entry in found.per_problem] == ["a", "b", "c"]
    assert [entry["num_correct"] for entry in found.per_problem] == [1, 2, 0]
    assert [entry["num_failed"] for entry in found.per_problem] == [0, 1, 0]
    assert [entry["num_truncated"] for entry in found.per_problem] == [1, 0, 2]
    assert found.per_problem[0]["pass_at_k"]["2"] == pytest.approx(1 / 2)


def test_rewards_between_nought_and_one():
    partly = [problem("a", "7", {"reward": 0.25}, {"reward": 0.75})]
    found = score(partly, ks=(2,), threshold=0.5, seed=0, has_answers=False)
    assert found.mean_at_k.mean == pytest.approx(0.5)
    assert found.mean_reward.mean == pytest.approx(0.5)
    assert found.best_at_k[2].mean == pytest.approx((0.25 + 3 * 0.75) / 4)
    assert found.pass_at_k[2].mean == 1.0
    assert found.maj_at_k is None
    assert found.per_problem[0]["maj_at_k"] is None


@pytest.mark.parametrize("rewards", [(1.0, -1.0, -1.0, -1.0), (0.9, 0.4, 0.0, 0.0)])
def test_mean_at_k_is_the_share_of_correct_responses_as_it_is_during_training(rewards):
    one = problem("a", "7", *({"reward": reward} for reward in rewards))
    found = score([one], ks=(4,), threshold=0.5, seed=0, has_answers=False)
    assert found.mean_at_k.mean == 0.25
    assert found.mean_reward.mean == pytest.approx(sum(rewards) / 4)
    assert found.per_problem[0]["mean_at_k"] == 0.25
    assert found.per_problem[0]["mean_reward"] == pytest.approx(sum(rewards) / 4)
    assert mean_so_far([one], threshold=0.5, seed=0).mean == 0.25
    batch = RewardBatch(rewards=torch.tensor(rewards), failed=torch.zeros(4, dtype=torch.bool))
    heldout = HeldOutSet(label="heldout", problems=[one.problem])
    training = evaluate(heldout, EvaluationConfig(path="x", samples=4), lambda _: batch, threshold=0.5)
    assert training.mean_at_k == found.mean_at_k.mean


def test_a_reward_that_reaches_the_threshold_in_float32_is_correct_as_in_training():
    """Eight tenths of a reward, added up in float64, are one unit in the last place short of 0.8."""
    rewards = [sum([0.1] * 8), 0.8, 0.7999, 0.0]
    assert rewards[0] < 0.8
    one = problem("a", "7", *({"reward": reward} for reward in rewards))
    assert score([one], ks=(4,), threshold=0.8, seed=0, has_answers=False).mean_at_k.mean == 0.5
    assert mean_so_far([one], threshold=0.8, seed=0).mean == 0.5
    batch = RewardBatch(rewards=torch.tensor(rewards), failed=torch.zeros(4, dtype=torch.bool))
    heldout = HeldOutSet(label="heldout", problems=[one.problem])
    training = evaluate(heldout, EvaluationConfig(path="x", samples=4), lambda _: batch, threshold=0.8)
    assert training.mean_at_k == 0.5


def test_the_same_seed_gives_the_same_scores():
    assert scores() == scores()
    assert scores(seed=1).mean_at_k.low is not None
