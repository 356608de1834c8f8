"""Numbers of a page: three digits as formatting would round them, and nothing lost by packing twice."""

import random

import numpy as np
import pytest

from gtpo_megatron.companions.report.packed import packed, unpacked


def test_numbers_are_what_formatting_would_make_of_them():
    rng = random.Random(1)
    values = [rng.choice((-1, 1)) * rng.uniform(0.1, 1) * 10 ** rng.randint(-19, 10) for _ in range(20_000)]
    values += [0.0, 1.0, 0.5, -2.0, 999.4, 0.9996, 1000.0, 123456.0, 1e-20, 9.99e9, 9.996]
    found = unpacked(packed(np.array(values)))
    assert found.tolist() == [float(f"{value:.3g}") for value in values]
    assert unpacked(packed(found)).tolist() == found.tolist()


@pytest.mark.parametrize(
    ("value", "found"),
    [(5e-324, 0.0), (-1e-23, 0.0), (1e-22, 1e-22), (1e10, 9.99e9), (-1e308, -9.99e9), (-0.0, 0.0)],
)
def test_what_has_no_code_is_0_or_the_largest(value, found):
    assert unpacked(packed(np.array([value]))).tolist() == [found]


def test_a_number_has_two_bytes_and_none_has_none():
    assert len(packed(np.ones(7))) == 14
    assert unpacked(packed(np.zeros(0))).tolist() == []
