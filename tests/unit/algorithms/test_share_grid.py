"""Grids follow what all ranks know."""

from dataclasses import replace

import pytest
import torch
from gtpo_megatron.algorithms.segments import plan_segments
from gtpo_megatron.algorithms.share_grid import LEAST_WEIGHT, ShareRule, check_weights, fixed_scales

from gtpo_megatron.errors import DataError
from tests.unit.algorithms.test_table import build

TABLE = build([1, 1, 0, 0], [0, 0, 0, 0], [5, 3, 4, 2])


def scales(rule: ShareRule, table=TABLE) -> list[float] | None:
    plan = plan_segments(table, spans_batch=False, shares_one_value=False)
    fixed = fixed_scales(table, plan, rule)
    return None if fixed is None else fixed.tolist()


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_a_sum_of_the_largest_terms_fits() -> None:
    # highest 3, lowest 2: two terms of 3 on O+, of 1/2 on O-
    assert scales(ShareRule(floor=0.0)) == [2.0**59, 2.0**59, 2.0**61, 2.0**61]
    assert scales(ShareRule(floor=0.0, clip=(0.25, 1.0))) == [2.0**60, 2.0**60, 2.0**60, 2.0**60]


def test_logs_have_a_grid_on_every_axis() -> None:
    # |log| < 700 < 2**10: two responses, or 8 and 6 tokens, or each row's own
    assert scales(ShareRule(is_geometric=True)) == [2.0**51] * 4
    assert scales(ShareRule(is_geometric=True, axis="matrix")) == [2.0**49, 2.0**49, 2.0**49, 2.0**49]
    assert scales(ShareRule(is_geometric=True, axis="response")) == [2.0**50, 2.0**50, 2.0**50, 2.0**51]


def test_no_grid_serves_a_wide_range() -> None:
    assert scales(ShareRule(axis="matrix")) is None
    assert scales(ShareRule(axis="response")) is None
    # two responses, 25 bits kept: the largest may be 2**35 times the smallest
    zero = replace(TABLE, lowest=column(0, 0, 0, 0), highest=column(1, 1, 1, 1))
    assert scales(ShareRule(floor=2.0**-34), zero) is not None
    assert scales(ShareRule(floor=2.0**-36), zero) is None
    assert scales(ShareRule(floor=0.0), zero) is None  # on O+ zeros are legal
    assert scales(ShareRule(floor=1e-8), replace(zero, highest=column(1, 1e30, 1, 1))) is None
    assert scales(ShareRule(floor=1e-8), replace(zero, highest=column(40, 40, 40, 40))) is not None


def test_zeros_need_a_floor_only_where_they_are_inverted() -> None:
    zero = replace(TABLE, lowest=column(0.0, 1.0, 1.0, 1.0))
    check_weights(zero, ShareRule(floor=0.0), "h")
    check_weights(zero, ShareRule(floor=1e-8, is_geometric=True), "h")
    with pytest.raises(DataError, match=r"h of response 0 of the batch contains 0\.0 with entropy_floor=0\.0"):
        check_weights(zero, ShareRule(floor=0.0, is_geometric=True), "h")
    wrong = replace(TABLE, lowest=column(1.0, 1.0, -0.0, 1.0))
    with pytest.raises(DataError, match=r"h of response 2 of the batch contains 0\.0 with"):
        check_weights(wrong, ShareRule(floor=0.0), "h")


def test_what_float64_cannot_invert_is_refused() -> None:
    check_weights(replace(TABLE, highest=column(1, 1, 1 / LEAST_WEIGHT, 1)), ShareRule(floor=0.0), "h")
    with pytest.raises(DataError, match=r"h of response 1 of the batch contains 1e\+300 .*too large.*entropy_clip"):
        check_weights(replace(TABLE, highest=column(1, 1e300, 1, 1)), ShareRule(), "h")
    check_weights(replace(TABLE, highest=column(1, 1e300, 1, 1)), ShareRule(clip=(0.0, 5.0)), "h")
    with pytest.raises(DataError, match=r"h of response 1 of the batch contains 1e\+31"):
        check_weights(replace(TABLE, highest=column(1, 1e31, 1, 1)), ShareRule(floor=1.0, is_geometric=True), "h")
    with pytest.raises(DataError, match=r"h of response 3 of the batch contains 1e-300 .*entropy_floor above 0"):
        check_weights(replace(TABLE, lowest=column(1, 1, 1, 1e-300)), ShareRule(floor=0.0), "h")
