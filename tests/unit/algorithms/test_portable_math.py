"""exp and log that give one result for one number, wherever it stands."""

import math

import pytest
import torch
from gtpo_megatron.algorithms.portable_math import LARGEST_LOG, portable_exp, portable_log
from gtpo_megatron.algorithms.share_grid import LEAST_WEIGHT
from hypothesis import given
from hypothesis import strategies as st


def one(function, value: float) -> float:
    return float(function(torch.tensor([value], dtype=torch.float64)))


@given(st.floats(1e-300, 1e300))
def test_log(value: float) -> None:
    assert one(portable_log, value) == pytest.approx(math.log(value), rel=5e-16, abs=3e-16)


@given(st.floats(-700, 700))
def test_exp(value: float) -> None:
    assert one(portable_exp, value) == pytest.approx(math.exp(value), rel=1.5e-15)


def test_the_ends() -> None:
    assert one(portable_log, 1.0) == 0.0
    assert one(portable_exp, 0.0) == 1.0
    assert one(portable_exp, 1e9) == one(portable_exp, 700.0)
    for edge in (2.0**-1022, LEAST_WEIGHT, 1 / LEAST_WEIGHT, 0.5**0.5, math.nextafter(0.5**0.5, 0), 2.0, 1e308):
        assert one(portable_log, edge) == pytest.approx(math.log(edge), rel=5e-16)
    assert abs(math.log(LEAST_WEIGHT)) < LARGEST_LOG


def test_a_result_does_not_depend_on_where_it_stands() -> None:
    values = torch.rand(1003, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 9 + 1e-6
    for function in (portable_log, portable_exp):
        whole = function(values)
        assert torch.equal(whole, torch.cat([function(part) for part in values.split(7)]))
