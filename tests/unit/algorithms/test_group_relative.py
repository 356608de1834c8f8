"""GRPO's and Dr.GRPO's advantages by hand."""

import pytest
import torch
from gtpo_megatron.algorithms.group_relative import group_relative_credit

from tests.unit.algorithms.test_table import build

TABLE = build([1.0, 0.0, 0.5, 1.0, 9.0], [0, 0, 0, 1, 0], [1, 2, 3, 1, 0])


def advantages(**options: object) -> list[float]:
    chosen = {"penalties": torch.zeros(5).double(), "ddof": 0, "eps": 0.0, "divides_by_std": True, **options}
    return group_relative_credit(TABLE, **chosen).advantages[:, 0].tolist()


def test_by_hand() -> None:
    std = (1 / 6) ** 0.5
    assert advantages() == pytest.approx([0.5 / std, -0.5 / std, 0, 0, 0], abs=1e-7)  # a row without tokens counts not
    assert advantages(ddof=1) == pytest.approx([1.0, -1.0, 0, 0, 0], abs=1e-7)
    assert advantages(eps=1.0) == pytest.approx([0.5 / (1 + std), -0.5 / (1 + std), 0, 0, 0], abs=1e-7)
    assert advantages(divides_by_std=False) == pytest.approx([0.5, -0.5, 0, 0, 0])
    penalties = torch.tensor([0.0, 0.0, -0.5, -1.0, 0.0], dtype=torch.float64)
    assert advantages(divides_by_std=False, penalties=penalties) == pytest.approx([2 / 3, -1 / 3, -1 / 3, 0, 0])
