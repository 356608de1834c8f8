"""GRPO-S on the numbers of the paper's worked case."""

import pytest
import torch
from gtpo_megatron.algorithms.grpo_s import grpo_s_credit
from gtpo_megatron.algorithms.shaping import PoolRule, ShapingRules, formulation_sides
from gtpo_megatron.algorithms.share_grid import ShareRule

from tests.unit.algorithms.test_table import build


def test_worked_case() -> None:
    table = build([1, 1, 0, 0], [0] * 4, [3, 2, 3, 1])
    entropy = torch.tensor([3.5 / 3, 1.0, 2 / 3, 0.8], dtype=torch.float64)
    rules = ShapingRules(
        share=ShareRule(floor=0.0), sides=formulation_sides("v6", 1.0, 0.1, None), pool=PoolRule(spans_batch=False)
    )
    result, _ = grpo_s_credit(
        table, entropy, rules, penalties=torch.zeros(4).double(), is_pooled=torch.ones(4, dtype=torch.bool)
    )
    shaped, advantages = result.shaped_rewards[:, 0].tolist(), result.advantages[:, 0].tolist()
    assert shaped == pytest.approx([1.107692, 1.092308, -1.109091, -1.090909], abs=1e-6)
    assert advantages == pytest.approx([1.013936, 0.985966, -1.016460, -0.983404], abs=1e-6)
