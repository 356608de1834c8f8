"""Flat tokens of any mask, and the table of responses: groups by label, sides by threshold."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gtpo_megatron.algorithms import assign_credit, informative_groups
from gtpo_megatron.algorithms.token_batch import Tokens, is_correct
from gtpo_megatron.config.algorithm import GRPOSConfig, GTPOConfig
from tests.strategies import Batch
from tests.unit.algorithms.parts import table_of

masks = st.integers(0, 4).flatmap(
    lambda width: st.lists(st.lists(st.booleans(), min_size=width, max_size=width), max_size=4).map(
        lambda rows: torch.tensor(rows, dtype=torch.bool).reshape(len(rows), width)
    )
)


@given(masks)
def test_tokens_are_those_of_the_mask_in_order(mask: torch.Tensor) -> None:
    tokens = Tokens.of(mask)
    places = [(i, t) for i, row in enumerate(mask.tolist()) for t, own in enumerate(row) if own]
    assert torch.equal(tokens.mask, mask)
    assert tokens.lengths.tolist() == mask.sum(1).tolist()
    assert tokens.row.tolist() == [i for i, _ in places]
    assert tokens.position.tolist() == [sum(mask[i, :t].tolist()) for i, t in places]  # own tokens before it


@given(masks)
def test_put_is_the_inverse_of_pick(mask: torch.Tensor) -> None:
    tokens = Tokens.of(mask)
    matrix = torch.arange(float(mask.numel())).view(mask.shape) + 1
    assert torch.equal(tokens.put(tokens.pick(matrix)), torch.where(mask, matrix, 0.0))
    assert tokens.put(tokens.pick(matrix)).dtype == torch.float32
    assert tokens.spread(torch.arange(len(mask))).tolist() == tokens.row.tolist()


def test_a_view_that_is_not_contiguous_will_do() -> None:
    matrix = torch.arange(12.0).view(4, 3).t()
    mask = (torch.arange(12) % 2 == 0).view(4, 3).t()
    assert Tokens.of(mask).pick(matrix).tolist() == matrix[mask].tolist()


def test_no_gradient_is_carried_along() -> None:
    matrix = torch.ones(2, 2, requires_grad=True)
    tokens = Tokens.of(torch.ones(2, 2, dtype=torch.bool))
    assert not tokens.pick(matrix).requires_grad


def test_no_tokens() -> None:
    for shape in ((0, 3), (3, 0), (0, 0)):
        tokens = Tokens.of(torch.zeros(shape, dtype=torch.bool))
        assert tokens.put(torch.zeros(0)).shape == shape
        assert tokens.position.shape == (0,)


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
@pytest.mark.parametrize("sides", ["both", "positive"])
def test_credit_and_dynamic_sampling_take_the_same_side(dtype: torch.dtype, threshold: float, sides: str) -> None:
    arguments = Batch([[1.0, 2.0], [2.0, 1.0]], [0, 0], [0, 0]).arguments()
    arguments["rewards"] = torch.tensor([threshold, 0.2], dtype=dtype)
    for config in (GTPOConfig, GRPOSConfig):
        credit = assign_credit(config(success_threshold=threshold, shaped_sides=sides), **arguments)
        assert (credit.shaped_rewards[0] > 0).all()
        assert (credit.shaped_rewards[1] < 0).all()
        assert credit.metrics["credit/one_sided_groups_frac"] == 0
    keep = informative_groups(arguments["rewards"], arguments["group_ids"], success_threshold=threshold)[1]
    assert keep.tolist() == [True]
