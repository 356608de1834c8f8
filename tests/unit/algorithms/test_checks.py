"""Every check says what, got and expected."""

import math

import pytest
import torch

from gtpo_megatron.algorithms import checks
from gtpo_megatron.algorithms.checks import LOWEST_ENTROPY, checked_tokens
from gtpo_megatron.algorithms.token_batch import Tokens
from gtpo_megatron.errors import DataError, ShapeError


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (lambda: checks.check_tensor(x=3), "x: expected a tensor, got int"),
        (lambda: checks.check_shape((2,), x=torch.zeros(3)), r"x: got shape \(3,\), expected \(2,\)"),
        (lambda: checks.check_num_dims(1, x=torch.zeros(3, 1)), r"x: got 2 dimensions \(3, 1\), expected 1"),
        (lambda: checks.check_mask(x=torch.zeros(3)), "x: got torch.float32, expected torch.bool"),
        (lambda: checks.check_full_precision(x=torch.zeros(3).half()), "x: got torch.float16"),
        (lambda: checks.check_labels(x=torch.zeros(3, dtype=torch.bool)), "x: got torch.bool, expected torch.int64"),
    ],
)
def test_wrong(check, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        check()


def test_right() -> None:
    checks.check_shape((2, 1), a=torch.zeros(2, 1), b=torch.ones(2, 1))
    checks.check_num_dims(2, a=torch.zeros(2, 1))
    checks.check_mask(a=torch.zeros(2, dtype=torch.bool))
    checks.check_full_precision(a=torch.zeros(1), b=torch.zeros(1).double())
    checks.check_labels(a=torch.zeros(1, dtype=torch.int32), b=torch.zeros(1, dtype=torch.int64))


MASK = torch.tensor([[False, True, False], [True, False, True]])


@pytest.mark.parametrize("foreign", [math.nan, math.inf, -9.0])
def test_foreign_values_are_not_looked_at(foreign: float) -> None:
    values = torch.where(MASK, 2.0, foreign)
    assert checked_tokens(Tokens.of(MASK), "h", values).tolist() == [2.0] * 3


def test_what_rounding_left_below_zero_is_zero() -> None:
    values = torch.full((2, 3), LOWEST_ENTROPY / 2)
    assert checked_tokens(Tokens.of(MASK), "h", values).tolist() == [0.0] * 3
    assert checked_tokens(Tokens.of(MASK), "h", -values, sign=-1.0).tolist() == [0.0] * 3
    assert values[0, 1] == LOWEST_ENTROPY / 2  # the caller's tensor stays


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -2e-4])
def test_the_first_bad_value_is_named(value: float) -> None:
    values = torch.ones(2, 3, dtype=torch.float64)
    values[1, 2] = value
    with pytest.raises(DataError, match=rf"^h\[1, 2\] = {value}: expected a finite value >= -0.0001"):
        checked_tokens(Tokens.of(MASK), "h", values)
    with pytest.raises(DataError, match=rf"^h\[1, 2\] = {-value}: expected a finite value <= 0.0001"):
        checked_tokens(Tokens.of(MASK), "h", -values, sign=-1.0)
