"""A threshold means the same number to rewards of any precision."""

import pytest
import torch

from gtpo_megatron.algorithms import assign_credit, informative_groups
from gtpo_megatron.algorithms.batch.outcome import is_correct
from gtpo_megatron.config.algorithm import GRPOSConfig, GTPOConfig
from tests.strategies import Batch

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
