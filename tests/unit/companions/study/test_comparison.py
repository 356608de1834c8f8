import math
import sys
from itertools import product

import numpy as np
import pytest

from gtpo_megatron.cli import dispatch
from gtpo_megatron.companions.study.comparison import (
    MAX_EXACT_PAIRS,
    compare,
    holm,
    paired_t_p,
    paired_t_power,
    scatter_limit,
    shown_p,
    sign_flip_p,
    smallest_detectable,
    standard_error,
)
from gtpo_megatron.errors import DataError, ShapeError

# the classical example of a paired test: extra hours of sleep of ten patients under two drugs (Student, 1908)
SLEEP_1 = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
SLEEP_2 = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]


def test_students_own_example():
    found = compare(SLEEP_2, SLEEP_1)
    assert found.difference.mean == pytest.approx(1.58)
    assert found.p_t == pytest.approx(0.00283289, rel=1e-5)
    assert found.t_interval == pytest.approx((0.7001142, 2.4598858), rel=1e-6)
    assert found.difference.low < 1.58 < found.difference.high
    assert found.num_pairs == 10


def test_the_statistics_are_those_of_before_scipy():
    """Fixed numbers: of an earlier state of this code, with a Student's t distribution of its own."""
    five = compare([0.178, 0.181, 0.169, 0.185, 0.176], [0.161, 0.166, 0.172, 0.150, 0.158])
    assert (five.difference.mean, five.difference.low, five.difference.high) == (
        0.016399999999999998, 0.00520000000000001, 0.027599999999999996
    )  # fmt: skip
    assert five.t_interval == pytest.approx((-0.00034175678566608983, 0.03314175678566608), rel=1e-10)
    assert five.p_t == pytest.approx(0.0529995421172259, rel=1e-12)
    assert five.p_sign_flip == 0.125
    twenty = compare(
        [round(0.1 * i + 0.03 * (i % 3), 3) for i in range(20)], [round(0.1 * i - 0.02 * (i % 7), 3) for i in range(20)]
    )
    assert twenty.t_interval == pytest.approx((0.06465392504113246, 0.10634607495886753), rel=1e-12)
    assert twenty.p_t == pytest.approx(5.7894616487220915e-08, rel=1e-12)
    assert twenty.p_sign_flip == 2 * 2 / 2**20  # all of one sign but one, which is 0


def test_without_scipy_the_extra_is_named_before_anything_is_trained(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.special", None)
    for name in ("comparison", "table", "page"):
        monkeypatch.delitem(sys.modules, f"gtpo_megatron.companions.study.{name}", raising=False)
    assert dispatch.run(["study"]) == 2
    assert "install the extra: uv pip install 'gtpo-megatron[study]'" in " ".join(capsys.readouterr().err.split())


def test_all_signs_against_a_loop():
    differences = [0.3, -0.1, 0.25, 0.0, 0.4]
    total = abs(sum(differences))
    hits = [
        abs(sum(s * d for s, d in zip(signs, differences, strict=True))) >= total - 1e-9
        for signs in product((1, -1), repeat=5)
    ]
    assert sign_flip_p(differences) == sum(hits) / 32
    assert sign_flip_p([1.0, 2.0, 3.0, 4.0, 5.0]) == 2 / 32  # the least that five pairs can give
    assert sign_flip_p([0.1, 0.2, 0.3]) == sign_flip_p([0.3, 0.1, 0.2]) == 2 / 8  # whatever the order of rounding


def test_signs_of_differences_that_cancel_but_for_rounding():
    differences = [0.3, 0.4, -0.4, -0.3]
    assert sum(differences) != 0.0
    assert sign_flip_p(differences) == 1.0  # no sum is nearer to 0 than theirs
    assert sign_flip_p([*differences, *[0.0] * MAX_EXACT_PAIRS]) == 1.0


def test_random_signs_agree_with_all_signs():
    differences = list(np.random.default_rng(3).normal(0.3, 1.0, size=MAX_EXACT_PAIRS))
    exact = sign_flip_p(differences)
    padded = sign_flip_p([*differences, 0.0])  # a pair without a difference changes nothing but the way it is computed
    assert padded == pytest.approx(exact, abs=0.015)


def test_pairs_without_scatter_or_difference():
    assert compare([0.5, 0.5], [0.5, 0.5]).p_t == 1.0
    for same in (compare([0.75, 1.0], [0.5, 0.75]), compare([0.52, 0.42], [0.50, 0.40])):  # equal but for rounding
        assert (same.p_t, same.p_sign_flip, same.smallest_detectable) == (1.0, 0.5, math.inf)
        assert same.t_interval == (-math.inf, math.inf)
    alone = compare([0.5], [0.25])
    assert (alone.p_t, alone.p_sign_flip, alone.smallest_detectable) == (1.0, 1.0, math.inf)
    assert alone.t_interval == (-math.inf, math.inf)


def test_the_t_test_and_its_interval_hold_what_they_promise_on_simulated_pairs():
    rng = np.random.default_rng(0)
    rejected = covered = 0
    for _ in range(1500):
        differences = rng.normal(0.0, 2.0, size=5)
        rejected += paired_t_p(list(differences)) < 0.05
        shifted = compare(list(differences + 1.0), [0.0] * 5) if _ < 150 else None
        covered += shifted is not None and shifted.t_interval[0] <= 1.0 <= shifted.t_interval[1]
    assert 0.035 < rejected / 1500 < 0.066  # 5% within three standard errors
    assert covered >= 135  # of 150


def test_the_smallest_detectable_difference_is_found_about_four_times_in_five():
    error = 1 / math.sqrt(5)
    effect = smallest_detectable(error, 5)
    rng = np.random.default_rng(1)
    found = sum(paired_t_p(list(rng.normal(effect, 1.0, size=5))) < 0.05 for _ in range(1500)) / 1500
    assert 0.75 < found < 0.87


@pytest.mark.parametrize("num_pairs", [2, 3, 4, 8, 20, 200])
@pytest.mark.parametrize("power", [0.5, 0.8, 0.95])
def test_the_smallest_detectable_difference_has_the_power_that_it_states(num_pairs, power):
    effect = smallest_detectable(0.25, num_pairs, power=power)
    assert paired_t_power(effect, 0.25 * math.sqrt(num_pairs), num_pairs) == pytest.approx(power, abs=1e-9)


def test_the_smallest_detectable_difference_of_two_pairs_on_simulated_pairs():
    effect = smallest_detectable(1 / math.sqrt(2), 2)
    differences = np.random.default_rng(1).normal(effect, 1.0, size=(20_000, 2))
    t = differences.mean(axis=1) / (differences.std(axis=1, ddof=1) / math.sqrt(2))
    assert (np.abs(t) > 12.7062).mean() == pytest.approx(0.8, abs=0.01)


def test_power_is_a_number_and_rises_however_far_a_difference_is():
    powers = [paired_t_power(0.1 * step, 1.0, 2) for step in range(220)]
    assert not any(map(math.isnan, powers))
    assert powers == sorted(powers)


def test_power_of_the_paired_t_test_against_simulated_pairs():
    rng = np.random.default_rng(2)
    found = sum(paired_t_p(list(rng.normal(1.0, 2.0, size=20))) < 0.05 for _ in range(1500)) / 1500
    assert paired_t_power(1.0, 2.0, 20) == pytest.approx(found, abs=0.04)
    assert paired_t_power(-1.0, 2.0, 20) == pytest.approx(paired_t_power(1.0, 2.0, 20), abs=1e-12)
    assert paired_t_power(0.0, 2.0, 20) == pytest.approx(0.05, abs=1e-9)


def test_the_limit_of_a_scatter_holds_on_simulated_values():
    rng = np.random.default_rng(3)
    above = sum(scatter_limit(float(rng.normal(size=5).std(ddof=1)), 5) < 1.0 for _ in range(4000)) / 4000
    assert above == pytest.approx(0.025, abs=0.008)
    assert scatter_limit(1.0, 5) == pytest.approx(2.8736, abs=1e-3)  # sqrt(4 / 0.4844), of any table of chi squared


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.6, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_bad_input_is_refused():
    with pytest.raises(ShapeError, match="3 and 2"):
        compare([1, 2, 3], [1, 2])
    with pytest.raises(ShapeError, match="at least one"):
        compare([], [])
    with pytest.raises(DataError, match="not finite"):
        compare([math.nan], [1.0])
    assert standard_error([1.0]) == math.inf


@pytest.mark.parametrize(
    ("p", "shown"), [(0.0, "<0.001"), (0.00049, "<0.001"), (0.0005, "0.001"), (0.0144, "0.014"), (1.0, "1.000")]
)
def test_a_p_is_never_shown_as_zero(p, shown):
    assert shown_p(p) == shown
