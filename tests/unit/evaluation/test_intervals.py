import math

import numpy as np
import pytest

from gtpo_megatron.errors import DataError, ShapeError
from gtpo_megatron.evaluation import intervals, metrics


def test_bootstrap_interval_covers_the_true_mean_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(200):
        sample = rng.beta(2.0, 3.0, size=60)
        interval = intervals.bootstrap_interval(sample, num_bootstrap=300, seed=trial)
        assert interval.low < interval.mean < interval.high
        covered += interval.low <= 0.4 <= interval.high
    assert 0.90 <= covered / 200 <= 0.985


@pytest.mark.parametrize("figure", ["mean", "pass"])
def test_intervals_of_sampled_accuracies_cover_the_true_ones(figure):
    """Problems of differing difficulty, eight samples each; the truth is over all problems that could be drawn."""
    rng = np.random.default_rng(7)
    covered = 0
    for trial in range(200):
        difficulty = rng.beta(1.0, 2.0, size=80)
        correct = rng.random((80, 8)) < difficulty[:, None]
        per_problem = correct.mean(axis=1) if figure == "mean" else metrics.pass_at_k_per_problem(correct, 4)
        # E[p] = 1/3 and E[1 - (1-p)^4] = 1 - B(1, 6) / B(1, 2) = 2/3
        truth = 1 / 3 if figure == "mean" else 2 / 3
        interval = intervals.bootstrap_interval(per_problem, num_bootstrap=300, seed=trial)
        covered += interval.low <= truth <= interval.high
    assert 0.90 <= covered / 200 <= 0.985


def test_several_figures_have_the_intervals_of_each():
    table = np.random.default_rng(3).random((40, 3))
    several = intervals.mean_intervals([table], num_bootstrap=500, seed=4)
    assert several == [intervals.bootstrap_interval(column, num_bootstrap=500, seed=4) for column in table.T]


def test_resamples_do_not_depend_on_how_many_are_in_memory(monkeypatch):
    values = np.random.default_rng(2).random(50)
    whole = intervals.bootstrap_interval(values, num_bootstrap=1001)
    monkeypatch.setattr(intervals, "BLOCK_DRAWS", 7)
    assert intervals.bootstrap_interval(values, num_bootstrap=1001) == whole


def test_bootstrap_interval_has_the_width_of_the_normal_theory():
    values = np.random.default_rng(1).normal(size=400)
    interval = intervals.bootstrap_interval(values, num_bootstrap=4000)
    assert interval.high - interval.low == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.05)
    assert interval == intervals.bootstrap_interval(values, num_bootstrap=4000)
    narrower = intervals.bootstrap_interval(values, num_bootstrap=4000, confidence=0.5)
    assert narrower.high - narrower.low < 0.5 * (interval.high - interval.low)


def test_a_mean_over_benchmarks_takes_them_as_given_and_draws_the_problems_of_each():
    """Its variance is that of independent means: neither pooled problems nor resampled benchmarks."""
    rng = np.random.default_rng(5)
    few, many = rng.normal(0.8, 0.3, size=(100, 2)), rng.normal(0.2, 0.1, size=(900, 2))
    for figure, interval in enumerate(intervals.mean_intervals([few, many], num_bootstrap=4000)):
        a, b = few[:, figure], many[:, figure]
        assert interval.mean == pytest.approx((a.mean() + b.mean()) / 2)
        width = 2 * 1.96 * math.sqrt(a.var() / 100 + b.var() / 900) / 2
        assert interval.high - interval.low == pytest.approx(width, rel=0.05)
    with pytest.raises(ShapeError, match=r"have \[1, 2\] figures"):
        intervals.mean_intervals([few, many[:, :1]])
    with pytest.raises(ShapeError, match="at least one"):
        intervals.mean_intervals([])


def test_values_that_say_nothing_are_refused():
    with pytest.raises(ShapeError, match=r"\[problems\]"):
        intervals.bootstrap_interval([[1.0]])
    with pytest.raises(DataError, match=r"confidence=1\.0"):
        intervals.bootstrap_interval([1.0], confidence=1.0)
    with pytest.raises(DataError, match="num_bootstrap=0"):
        intervals.bootstrap_interval([1.0], num_bootstrap=0)


@pytest.mark.parametrize("values", [[[1.0, 2.0], [3.0]], ["a", "b"], [{}], {"a": 1.0}])
def test_what_is_no_vector_of_numbers_is_said_in_our_words(values):
    with pytest.raises(ShapeError, match=r"per_problem is ragged or not numeric .* expected \[problems\]"):
        intervals.bootstrap_interval(values)
    with pytest.raises(ShapeError, match="c is ragged or not numeric"):
        intervals.mean_intervals([values])
