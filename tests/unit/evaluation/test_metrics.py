import itertools
import math

import numpy as np
import pytest
import torch

from gtpo_megatron.errors import DataError, ShapeError
from gtpo_megatron.evaluation import metrics

C = [[1, 0, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 1, 0, 0, 0]]


def test_mean_at_k_is_the_mean_of_all_samples():
    assert metrics.mean_at_k(C) == pytest.approx(8 / 20)
    assert metrics.mean_at_k(torch.tensor(C)) == pytest.approx(8 / 20)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_equals_enumeration_of_all_subsets(k):
    expected = np.mean([np.mean([max(subset) for subset in itertools.combinations(row, k)]) for row in C])
    assert metrics.pass_at_k(C, k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_of_many_samples_neither_overflows_nor_cancels():
    row = [[1.0] + [0.0] * 4095]
    assert metrics.pass_at_k(row, 64) == pytest.approx(64 / 4096, rel=1e-9)


def test_pass_at_k_refuses_rewards_and_k_beyond_the_samples():
    with pytest.raises(DataError, match="0 or 1"):
        metrics.pass_at_k([[0.5, 1.0]], 1)
    with pytest.raises(DataError, match=r"k=3.*at most the 2 samples"):
        metrics.pass_at_k([[0, 1]], 3)
    with pytest.raises(DataError, match="k=0"):
        metrics.pass_at_k([[0, 1]], 0)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_best_at_k_equals_enumeration_of_all_draws_with_replacement(k):
    rewards = [[0.1, 0.7, -0.2, 0.7], [0.0, 0.0, 1.0, 0.5]]
    expected = np.mean([np.mean([max(draw) for draw in itertools.product(row, repeat=k)]) for row in rewards])
    assert metrics.best_at_k(rewards, k) == pytest.approx(expected, abs=1e-12)


def test_best_at_k_of_zero_one_rewards_has_its_closed_form_and_stays_below_pass_at_k():
    expected = np.mean([1 - (1 - sum(row) / 5) ** 4 for row in C])
    assert metrics.best_at_k(C, 4) == pytest.approx(expected, abs=1e-12)
    assert metrics.best_at_k(C, 4) < metrics.pass_at_k(C, 4)
    assert metrics.best_at_k(C, 100) == pytest.approx(3 / 4, abs=1e-6)  # k may exceed the samples


def test_bootstrapped_best_at_k_is_seeded_and_near_the_exact_one():
    drawn = metrics.best_at_k(C, 3, num_bootstrap=4000, seed=1)
    assert drawn == metrics.best_at_k(C, 3, num_bootstrap=4000, seed=1)
    assert drawn != metrics.best_at_k(C, 3, num_bootstrap=4000, seed=2)
    assert drawn == pytest.approx(metrics.best_at_k(C, 3), abs=0.02)


def loop_maj(rewards, answers, k):
    """Majority of every draw, by the words of the docstring."""
    scores = []
    for draw in itertools.product(range(len(rewards)), repeat=k):
        votes = [answers[i] for i in draw if answers[i] is not None]
        if not votes:
            scores.append(0.0)
            continue
        winner = max(votes, key=lambda answer: (votes.count(answer), -[answers[i] for i in draw].index(answer)))
        scores.append(np.mean([reward for reward, answer in zip(rewards, answers, strict=True) if answer == winner]))
    return np.mean(scores)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_maj_at_k_approaches_enumeration_of_all_draws(k):
    rewards = [[1, 0, 0, 1, 0], [0, 0, 1, 0, 0]]
    answers = [["a", "b", "c", "a", None], ["x", "x", "y", None, "z"]]
    expected = np.mean([loop_maj(r, a, k) for r, a in zip(rewards, answers, strict=True)])
    drawn = metrics.maj_at_k(rewards, answers, k, num_bootstrap=20_000, seed=3)
    assert drawn == pytest.approx(expected, abs=5 * 0.5 / math.sqrt(2 * 20_000))


def test_majority_of_two_answers_has_its_closed_form():
    """k odd, share p of the samples right: the binomial probability of more than k/2 right ones."""
    rewards, answers = [[1, 1, 1, 0, 0]], [["r", "r", "r", "w", "w"]]
    for k in (1, 3, 9):
        expected = sum(math.comb(k, i) * 0.6**i * 0.4 ** (k - i) for i in range(k // 2 + 1, k + 1))
        drawn = metrics.maj_at_k(rewards, answers, k, num_bootstrap=20_000, seed=5)
        assert drawn == pytest.approx(expected, abs=5 * 0.5 / math.sqrt(20_000))


def test_majority_needs_votes_not_silence():
    assert metrics.maj_at_k([[1, 1]], [[None, None]], 2) == 0.0
    # Two of three samples are silent; the one answer still decides every draw in which it occurs.
    drawn = metrics.maj_at_k([[0, 0, 1]], [[None, None, "a"]], 3, num_bootstrap=20_000)
    assert drawn == pytest.approx(1 - (2 / 3) ** 3, abs=0.02)


def test_equal_answers_graded_apart_score_their_mean():
    assert metrics.maj_at_k([[1, 0]], [["a", "a"]], 2) == 0.5


def test_maj_at_k_refuses_answers_of_another_shape():
    with pytest.raises(ShapeError, match="answers"):
        metrics.maj_at_k([[1, 0]], [["a"]], 1)
    with pytest.raises(ShapeError, match="answers"):
        metrics.maj_at_k([[1, 0]], [["a", "b"], ["a", "b"]], 1)


@pytest.mark.parametrize("bad", [[], [[]], [1, 0], [[[1]]], [[1, 0], [1]], [["right"]]])
def test_shapes_that_are_not_problems_by_samples_are_refused(bad):
    with pytest.raises(ShapeError):
        metrics.mean_at_k(bad)


def test_values_that_say_nothing_are_refused():
    with pytest.raises(DataError, match="NaN"):
        metrics.mean_at_k([[1.0, math.nan]])
    with pytest.raises(DataError, match="num_bootstrap=0"):
        metrics.best_at_k([[1.0]], 1, num_bootstrap=0, seed=0)
