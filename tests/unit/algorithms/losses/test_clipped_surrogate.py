"""The surrogate and its derivative in every region."""

import pytest
import torch

from gtpo_megatron.algorithms.losses.clipped_surrogate import clipped_surrogate


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual", "loss", "slope"),
    [
        (1.0, 2.0, None, -2.0, -2.0),
        (1.0, -2.0, None, 2.0, 2.0),
        (1.5, 2.0, None, -2.56, 0.0),
        (1.5, -2.0, None, 3.0, 2.0),
        (0.5, 2.0, None, -1.0, -2.0),
        (0.5, -2.0, None, 1.6, 0.0),
        (9.0, -2.0, 3.0, 6.0, 0.0),
        (2.0, -2.0, 3.0, 4.0, 2.0),
        (9.0, 2.0, 3.0, -2.56, 0.0),
        (9.0, 0.0, None, 0.0, 0.0),
    ],
)
def test_regions(ratio: float, advantage: float, dual: float | None, loss: float, slope: float) -> None:
    w = torch.tensor([ratio], dtype=torch.float64, requires_grad=True)
    value = clipped_surrogate(
        w,
        torch.tensor([advantage], dtype=torch.float64),
        clip_eps_low=0.2,
        clip_eps_high=0.28,
        dual_clip=dual,
    )
    value.sum().backward()
    assert value.item() == pytest.approx(loss)
    assert w.grad is not None
    assert w.grad.item() == pytest.approx(slope)
