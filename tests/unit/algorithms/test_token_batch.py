"""Flat tokens of any mask, and the table of responses: groups by label, sides by threshold."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gtpo_megatron.algorithms import assign_credit, informative_groups
from gtpo_megatron.algorithms.checks import flatten
from gtpo_megatron.config.algorithm import GRPOSConfig, GTPOConfig
from gtpo_megatron.outcomes import is_correct
from tests.strategies import Batch
from tests.unit.algorithms.parts import batch_of, table_of

masks = st.integers(0, 4).flatmap(
    lambda width: st.lists(st.lists(st.booleans(), min_size=width, max_size=width), max_size=4).map(
        lambda rows: torch.tensor(rows, dtype=torch.bool).reshape(len(rows), width)
    )
)


@given(masks)
def test_tokens_are_those_of_the_mask_in_order(mask: torch.Tensor) -> None:
    batch = batch_of(mask, [])
    places = [(i, t) for i, row in enumerate(mask.tolist()) for t, own in enumerate(row) if own]
    assert batch.lengths.tolist() == mask.sum(1).tolist()
    assert batch.row.tolist() == [i for i, _ in places]
    assert batch.position.tolist() == [sum(mask[i, :t].tolist()) for i, t in places]  # own tokens before it


@given(masks)
def test_what_is_flat_is_padded_again(mask: torch.Tensor) -> None:
    batch = batch_of(mask, [])
    matrix = torch.arange(float(mask.numel())).view(mask.shape) + 1
    padded = batch.padded(flatten(mask, matrix))
    assert torch.equal(padded, torch.where(mask, matrix, 0.0))
    assert padded.dtype == torch.float32
    assert batch.spread(torch.arange(len(mask))).tolist() == batch.row.tolist()


# --------------------------------------------------------------------------------------------------------- the table
def test_groups_and_sides() -> None:
    table = table_of([1.0, 0.0, 0.5, 1.0, 1.0], [2**62, -5, -5, 2**62, 3], [1, 2, 3, 0, 4])
    assert table.group_index.tolist() == [2, 0, 0, 2, 1]
    assert table.num_groups == 3
    assert table.rewards.tolist() == [1.0, 0.0, 0.5, 1.0, 1.0]
    assert table.is_correct.tolist() == [True, False, True, False, True]
    assert table.is_live.tolist() == [True, True, True, False, True]
    assert table.lengths.tolist() == [1, 2, 3, 0, 4]
    assert table.is_one_sided.tolist() == [False, True, True]
    assert table.mine == slice(0, 5)
    for spans_batch, scopes, sides in ((False, [2, 0, 0, 2, 1], [5, 0, 1, 4, 3]), (True, [0] * 5, [1, 0, 1, 0, 1])):
        scope, num_scopes = table.scopes(spans_batch=spans_batch)
        side, num_sides = table.sides(spans_batch=spans_batch)
        assert (scope.tolist(), num_scopes) == (scopes, 1 if spans_batch else 3)
        assert (side.tolist(), num_sides) == (sides, 2 * num_scopes)


def test_the_threshold_is_reached_or_not() -> None:
    assert table_of([0.3, 0.29], [0, 0], [1, 1], threshold=0.3).is_correct.tolist() == [True, False]
    assert table_of([0.7, 0.69], [0, 0], [1, 1], threshold=0.7).is_correct.tolist() == [True, False]


@pytest.mark.parametrize("lengths", [[0, 0], [3, 2**40]])
def test_a_group_is_judged_by_responses_with_tokens(lengths: list[int]) -> None:
    table = table_of([1.0, 0.0], [7, 7], lengths)
    assert table.is_one_sided.tolist() == [lengths[0] == 0]
    assert table.lengths.tolist() == lengths


FLOATS = [torch.bfloat16, torch.float32, torch.float64]
THRESHOLDS = [0.5, 0.7, 0.9, 0.95]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("threshold", THRESHOLDS)
def test_a_reward_equal_to_the_threshold_is_correct(dtype: torch.dtype, threshold: float) -> None:
    rewards = torch.tensor([threshold, threshold - 0.05, threshold + 0.05], dtype=dtype)
    assert is_correct(rewards, success_threshold=threshold).tolist() == [True, False, True]


def test_whole_rewards_are_compared_with_the_threshold_as_it_is() -> None:
    assert is_correct(torch.tensor([0, 1, 2]), success_threshold=1.5).tolist() == [False, False, True]
    assert is_correct(torch.tensor([False, True]), success_threshold=0.5).tolist() == [False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("threshold", THRESHOLDS)
def test_credit_and_dynamic_sampling_take_the_same_side(dtype: torch.dtype, threshold: float) -> None:
    arguments = Batch([[1.0, 2.0], [2.0, 1.0]], [0, 0], [0, 0]).arguments()
    arguments["rewards"] = torch.tensor([threshold, 0.2], dtype=dtype)
    for config in (GTPOConfig, GRPOSConfig):
        credit = assign_credit(config(success_threshold=threshold), **arguments)
        assert (credit.shaped_rewards[0] > 0).all()
        assert (credit.shaped_rewards[1] < 0).all()
        assert credit.metrics["credit/one_sided_groups_frac"] == 0
    keep = informative_groups(arguments["rewards"], arguments["group_ids"], success_threshold=threshold)[1]
    assert keep.tolist() == [True]
