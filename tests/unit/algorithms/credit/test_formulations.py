"""The table of formulations."""

import pytest
import torch

from gtpo_megatron.algorithms.credit.formulations import shaped_reward
from tests.unit.algorithms.parts import column


@pytest.mark.parametrize(
    ("formulation", "kappa", "wrong", "correct"),
    [
        ("v1", None, [0.0, 0.0], [0.9, 1.2]),
        ("v1_clipped", 4.0, [0.0, 0.0], [1.0, 1.125]),
        ("v2", None, [0.0, -3.0], [0.9, 1.2]),
        ("v2", 4.0, [0.0, -3.0], [1.0, 1.125]),
        ("v6", None, [-0.9, -1.2], [0.9, 1.2]),
    ],
)
def test_formulations(formulation: str, kappa: float | None, wrong: list[float], correct: list[float]) -> None:
    share = column(0.0, 3.0, 0.0, 3.0)
    is_correct = torch.tensor([False, False, True, True])
    found = shaped_reward(formulation, is_correct, share, base=0.9, bonus=0.1, kappa=kappa)
    assert found.tolist() == pytest.approx(wrong + correct)
    assert share.tolist() == [0.0, 3.0, 0.0, 3.0]  # the metrics look at it afterwards


@pytest.mark.parametrize("formulation", ["v1", "v1_clipped", "v2", "v6"])
def test_no_tokens(formulation: str) -> None:
    nothing = torch.zeros(0, dtype=torch.float64)
    assert shaped_reward(formulation, nothing.bool(), nothing, base=1, bonus=1, kappa=None).shape == (0,)
