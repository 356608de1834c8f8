"""GRPO's and Dr.GRPO's advantages by hand."""

import pytest
import torch

from gtpo_megatron.algorithms import assign_credit
from gtpo_megatron.config.algorithm import AlgorithmConfig, DrGRPOConfig, GRPOConfig
from gtpo_megatron.config.algorithm.base import SoftOverlongPenalty
from tests.strategies import Batch

# a row without tokens counts in no group, whatever its reward
BATCH = Batch([[1.0], [1.0] * 2, [1.0] * 3, [1.0], []], [1.0, 0.0, 0.5, 1.0, 9.0], [0, 0, 0, 1, 0])


def advantages(config: AlgorithmConfig) -> list[float]:
    found = assign_credit(config, **BATCH.arguments()).advantages
    mask = BATCH.arguments()["response_mask"]
    assert torch.equal(found, torch.where(mask, found[:, :1], 0.0))  # one value a response
    return found[:, 0].tolist()


def test_by_hand() -> None:
    std = (1 / 6) ** 0.5
    assert advantages(GRPOConfig()) == pytest.approx([0.5 / std, -0.5 / std, 0, 0, 0], abs=1e-7)
    assert advantages(GRPOConfig(std_ddof=1)) == pytest.approx([1.0, -1.0, 0, 0, 0], abs=1e-7)
    wanted = [0.5 / (1 + std), -0.5 / (1 + std), 0, 0, 0]
    assert advantages(GRPOConfig(std_eps=1.0)) == pytest.approx(wanted, abs=1e-7)
    assert advantages(DrGRPOConfig()) == pytest.approx([0.5, -0.5, 0, 0, 0])


def test_the_length_penalty_is_part_of_the_reward() -> None:
    penalty = SoftOverlongPenalty(max_tokens=3, buffer_tokens=2, applies_to="all")  # 0, -0.5 and -1 of 1, 2, 3 tokens
    config = DrGRPOConfig(length_penalty=penalty)
    assert advantages(config) == pytest.approx([1.0, -0.5, -0.5, 0, 0])
    shaped = assign_credit(config, **BATCH.arguments()).shaped_rewards
    assert shaped[:, 0].tolist() == [1.0, -0.5, -0.5, 1.0, 0.0]


@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, 1e9, 1e-300])
def test_equal_rewards_have_no_advantage(reward: float) -> None:
    batch = Batch([[1.0]] * 7, [reward] * 7, [0] * 7)
    for config in (GRPOConfig(), DrGRPOConfig()):
        assert not assign_credit(config, **batch.arguments()).advantages.any()


def test_no_responses() -> None:
    empty = Batch([], [], []).arguments()
    assert assign_credit(GRPOConfig(), **empty).advantages.shape == (0, 0)
