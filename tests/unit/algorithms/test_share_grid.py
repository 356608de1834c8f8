"""Grids follow what all ranks know."""

from dataclasses import replace

import pytest
import torch

from gtpo_megatron.algorithms.segments import plan_segments
from gtpo_megatron.algorithms.share_grid import ShareRule, TokenWeights, check_positive, segment_scales, total_magic
from gtpo_megatron.errors import DataError
from tests.unit.algorithms.test_table import build

TABLE = build([1, 1, 0, 0], [0, 0, 0, 0], [5, 3, 4, 2])


def scales(rule: ShareRule) -> list[float]:
    plan = plan_segments(TABLE, spans_batch=False, shares_one_value=False)
    return segment_scales(TABLE, plan, rule).tolist()


def test_a_sum_of_the_largest_terms_fits() -> None:
    # highest 3, lowest 2: two terms of 3 on O+, of 1/2 on O-
    assert scales(ShareRule(floor=0.0)) == [2.0**59, 2.0**59, 2.0**61, 2.0**61]
    assert scales(ShareRule(floor=0.0, axis="matrix")) == [2.0**57, 2.0**57, 2.0**60, 2.0**60]
    assert scales(ShareRule(floor=0.0, axis="response")) == [2.0**58, 2.0**58, 2.0**60, 2.0**61]
    assert scales(ShareRule(floor=0.0, clip=(0.25, 1.0))) == [2.0**60, 2.0**60, 2.0**60, 2.0**60]


def test_zeros_need_a_floor_only_where_they_are_inverted() -> None:
    zero = replace(TABLE, lowest=torch.tensor([0.0, 1.0, 1.0, 1.0], dtype=torch.float64))
    check_positive(zero, ShareRule(floor=0.0))
    check_positive(zero, ShareRule(floor=1e-8, is_geometric=True))
    with pytest.raises(DataError, match="entropy_floor=0"):
        check_positive(zero, ShareRule(floor=0.0, is_geometric=True))


def test_exact_totals_only_of_bounded_shares_in_wide_pools() -> None:
    plan = plan_segments(TABLE, spans_batch=False, shares_one_value=False)
    tokens = TokenWeights(values=torch.ones(4, 5), response_mask=torch.ones(4, 5, dtype=torch.bool))
    wide = ShareRule(finds_lowest=False)
    assert total_magic(tokens, TABLE, plan, wide) is not None
    assert total_magic(tokens, TABLE, plan, replace(wide, finds_lowest=True)) is None
    assert total_magic(tokens, TABLE, plan, replace(wide, is_geometric=True)) is None
    assert total_magic(tokens, TABLE, plan, replace(wide, axis="matrix")) is None
    assert total_magic(replace(tokens, shaping_mask=tokens.response_mask), TABLE, plan, wide) is None
    huge = replace(TABLE, lengths=torch.full((4,), 2**30))
    assert total_magic(tokens, huge, plan, wide) is None
