import math

import pytest

from gtpo_megatron.errors import DataError
from gtpo_megatron.evaluation.student_t import cdf, quantile


@pytest.mark.parametrize(
    ("degrees", "probability", "expected"),
    [  # printed tables
        (1, 0.975, 12.7062), (2, 0.975, 4.30265), (4, 0.975, 2.77645), (4, 0.8, 0.940965), (9, 0.95, 1.83311),
        (29, 0.995, 2.75639), (1000, 0.975, 1.96234), (4, 0.025, -2.77645),
    ],
)  # fmt: skip
def test_quantiles_of_printed_tables(degrees, probability, expected):
    assert quantile(probability, degrees) == pytest.approx(expected, rel=2e-6)


def test_one_and_two_degrees_have_closed_forms():
    for t in (-30.0, -1.5, -1e-3, 0.0, 0.2, 1.0, 7.0, 1e4):
        assert cdf(t, 1) == pytest.approx(0.5 + math.atan(t) / math.pi, rel=1e-11)
        assert cdf(t, 2) == pytest.approx(0.5 + t / (2 * math.sqrt(2 + t * t)), abs=1e-12)


def test_four_degrees_by_integration():
    def density(t):
        return 3 / 8 * (1 + t * t / 4) ** -2.5

    step = 1e-4
    area = sum(density((i + 0.5) * step) for i in range(int(1.7 / step))) * step
    assert cdf(1.7, 4) == pytest.approx(0.5 + area, abs=1e-9)


def test_ends_and_symmetry():
    assert (cdf(math.inf, 3), cdf(-math.inf, 3), cdf(0.0, 3)) == (1.0, 0.0, 0.5)
    assert cdf(2.5, 7) + cdf(-2.5, 7) == pytest.approx(1.0, abs=1e-15)
    assert cdf(quantile(0.9, 6.5), 6.5) == pytest.approx(0.9, abs=1e-12)


@pytest.mark.parametrize(
    "call", [lambda: cdf(1, 0), lambda: cdf(math.nan, 2), lambda: quantile(1.0, 2), lambda: quantile(0.5, -1)]
)
def test_arguments_out_of_range(call):
    with pytest.raises(DataError, match=r"must|not a number"):
        call()
