"""The table of formulations."""

import pytest
import torch
from gtpo_megatron.algorithms.shaping import SideRule, formulation_sides


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
    shares = torch.tensor([0.0, 3.0], dtype=torch.float64)
    sides = formulation_sides(formulation, 0.9, 0.1, kappa)
    assert sides[0].reward(shares).tolist() == pytest.approx(wrong)
    assert sides[1].reward(shares).tolist() == pytest.approx(correct)
    assert sides[1].is_clipped == (kappa is not None)


def test_a_side_is_clipped_at_either_end() -> None:
    assert SideRule(base=0.0, slope=1.0, low=0.0).is_clipped
    assert SideRule(base=0.0, slope=1.0, high=0.0).is_clipped
    assert not SideRule(base=0.0, slope=1.0).is_clipped
