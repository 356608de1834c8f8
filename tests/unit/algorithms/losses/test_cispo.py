"""CISPO: the weight is truncated, the gradient never dropped."""

import math

import pytest
import torch

from gtpo_megatron.algorithms.losses.cispo import cispo_loss
from gtpo_megatron.algorithms.losses.loss_batch import LossInputs
from gtpo_megatron.config.algorithm import CISPOConfig


@pytest.mark.parametrize(("ratio", "weight"), [(0.01, 0.01), (1.0, 1.0), (3.0, 3.0), (9.0, 5.0)])
def test_weight_is_truncated_and_detached(ratio: float, weight: float) -> None:
    logprobs = torch.tensor([[-2.0]], dtype=torch.float64, requires_grad=True)
    old = torch.full((1, 1), -2.0 - math.log(ratio), dtype=torch.float64)
    inputs = LossInputs(
        logprobs=logprobs,
        old_logprobs=old,
        log_ratios=logprobs - old,
        advantages=torch.tensor([[3.0]]).double(),
        mask=torch.tensor([[True]]),
    )
    loss = cispo_loss(CISPOConfig(clip_eps_low=1.0, clip_eps_high=4.0), inputs)
    loss.sum().backward()
    assert loss.item() == pytest.approx(-weight * 3.0 * -2.0)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(-weight * 3.0)
