"""REINFORCE: the gradient is the advantage times the ratio, whatever the ratio is."""

import math

import pytest
import torch

from gtpo_megatron.algorithms import policy_loss
from gtpo_megatron.config.algorithm import RLOOConfig


@pytest.mark.parametrize("ratio", [0.5, 1.0, 3.0])
def test_nothing_is_clipped(ratio: float) -> None:
    logprobs = torch.tensor([[-1.0, -2.0]], dtype=torch.float64, requires_grad=True)
    terms = policy_loss(
        RLOOConfig(),
        logprobs=logprobs,
        old_logprobs=logprobs.detach() - math.log(ratio),
        advantages=torch.tensor([[2.0, -3.0]], dtype=torch.float64),
        response_mask=torch.ones(1, 2, dtype=torch.bool),
    )
    terms.loss_sum.backward()
    assert logprobs.grad is not None
    assert logprobs.grad[0].tolist() == pytest.approx([-2.0 * ratio, 3.0 * ratio])
