"""The bonus raises every advantage and flips no sign."""

import math

import torch
from gtpo_megatron.algorithms.entropy_advantage import add_entropy_bonus


def test_bonus() -> None:
    advantages = torch.tensor([[1.0, -1.0, 1.0, 0.0, 0.0]])
    entropy = torch.tensor([[0.5, 9.0, -5e-5, 3.0, math.nan]])
    mask = torch.tensor([[True, True, True, True, False]])
    add_entropy_bonus(advantages, entropy, mask, coefficient=0.4, bound=2.0)
    torch.testing.assert_close(advantages, torch.tensor([[1.2, -0.5, 1.0, 0.0, 0.0]]))
