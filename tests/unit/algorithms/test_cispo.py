"""CISPO: the weight is truncated, the gradient never dropped."""

import math

import pytest
import torch
from gtpo_megatron.algorithms.cispo import cispo_loss


@pytest.mark.parametrize(("ratio", "weight"), [(0.01, 0.01), (1.0, 1.0), (3.0, 3.0), (9.0, 5.0)])
def test_weight_is_truncated_and_detached(ratio: float, weight: float) -> None:
    logprobs = torch.tensor([-2.0], dtype=torch.float64, requires_grad=True)
    log_ratios = logprobs - (-2.0 - math.log(ratio))
    loss = cispo_loss(logprobs, log_ratios, torch.tensor([3.0]).double(), clip_eps_low=1.0, clip_eps_high=4.0)
    loss.sum().backward()
    assert loss.item() == pytest.approx(-weight * 3.0 * -2.0)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(-weight * 3.0)
