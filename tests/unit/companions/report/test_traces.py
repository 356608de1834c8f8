"""The smoothing of curves against a loop over windows."""

import math
import time

import numpy as np
import pytest

from gtpo_megatron.companions.report.traces import MIN_STEPS_TO_SMOOTH, smooth


def by_loop(values):
    half = len(values) // 20
    means = []
    for index in range(len(values)):
        reach = min(half, index, len(values) - 1 - index)
        window = values[index - reach : index + reach + 1]
        means.append(sum(window) / len(window))
    return means, 2 * half + 1


@pytest.mark.parametrize("length", [MIN_STEPS_TO_SMOOTH, 21, 39, 40, 63, 400, 1003])
@pytest.mark.parametrize("size", [1.0, 1e-9, 1e99])
def test_a_running_mean_is_that_of_its_windows(length, size):
    rng = np.random.default_rng(length)
    values = (size * rng.lognormal(sigma=3.0, size=length)).tolist()
    values[length // 3] *= 1e12  # a peak, after which no digit of the others may be lost
    means, width = smooth(values)
    expected, expected_width = by_loop(values)
    assert width == expected_width
    assert means == pytest.approx(expected, rel=1e-12, abs=0.0)
    assert all(type(mean) is float for mean in means)


@pytest.mark.parametrize("place", [0, 1, 30, 58, 59])
@pytest.mark.parametrize("hole", [math.nan, math.inf])
def test_what_is_not_finite_is_in_the_windows_that_have_it(place, hole):
    values = [float(index % 7 + 1) for index in range(60)]
    values[place] = hole
    assert smooth(values)[0] == pytest.approx(by_loop(values)[0], rel=1e-12, nan_ok=True)


def test_a_short_series_is_left_as_it_is():
    values = [1.0] * (MIN_STEPS_TO_SMOOTH - 1)
    assert smooth(values) == (values, 1)


def test_equal_values_stay_themselves():
    assert smooth([0.25] * 100) == ([0.25] * 100, 11)


def test_a_long_series_takes_no_longer_a_step_than_a_short_one():
    values = [float(index % 7) for index in range(100_000)]
    start = time.process_time()
    smooth(values)
    assert time.process_time() - start < 2.0, "a sum for each window takes several times as long"
