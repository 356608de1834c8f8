"""Gradient from the tokens of highest entropy only."""

import torch

from gtpo_megatron.algorithms.losses.loss_batch import LossInputs
from gtpo_megatron.algorithms.losses.top_entropy import top_entropy_loss
from gtpo_megatron.config.algorithm import TopEntropyConfig


def test_other_tokens_have_no_loss() -> None:
    logs = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    inputs = LossInputs(
        logprobs=logs,
        old_logprobs=torch.zeros_like(logs),
        log_ratios=logs,
        advantages=torch.full_like(logs, 3.0),
        mask=torch.ones(1, 2, dtype=torch.bool),
        selection=torch.tensor([[False, True]]),
    )
    loss = top_entropy_loss(TopEntropyConfig(), inputs)
    loss.sum().backward()
    assert loss.tolist() == [[0.0, -3.0]]
    assert logs.grad is not None
    assert logs.grad.tolist() == [[0.0, -3.0]]
