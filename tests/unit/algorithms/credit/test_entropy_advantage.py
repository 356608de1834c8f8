"""The bonus raises every advantage and flips no sign."""

import math

import torch

from gtpo_megatron.algorithms import assign_credit
from gtpo_megatron.config.algorithm import EntropyAdvantageConfig, GRPOConfig
from tests.strategies import Batch


def test_bonus() -> None:
    batch = Batch([[0.5, 9.0, -5e-5], [9.0], [3.0, 3.0], []], [1, 0, 1, 0], [0, 0, 1, 1])
    arguments = batch.arguments(padding=math.nan)
    found = assign_credit(EntropyAdvantageConfig(coefficient=0.4, bound=2.0), **arguments)
    torch.testing.assert_close(found.advantages, batch.matrix([[1.2, 1.5, 1.0], [-0.5], [0.0, 0.0], []]).float())
    plain = assign_credit(GRPOConfig(), **arguments)
    assert torch.equal(found.shaped_rewards, plain.shaped_rewards)
    assert bool((found.advantages >= plain.advantages).all())
    assert bool((found.advantages.sign() == plain.advantages.sign()).all())
