"""Gradient from the tokens of highest entropy only."""

import torch

from gtpo_megatron.algorithms.losses.loss_batch import LossInputs
from gtpo_megatron.algorithms.losses.top_entropy import select_top_entropy, top_entropy_loss
from gtpo_megatron.config.algorithm import TopEntropyConfig
from tests.unit.algorithms.parts import batch_of


def test_selection() -> None:
    batch, none = batch_of([3, 2], [1.0, 0.0, 0.5, 2.0, 0.0]), torch.zeros(5)
    top = select_top_entropy(TopEntropyConfig(top_fraction=0.4), batch, none)
    assert top.tolist() == [True, False, False, True, False]
    assert select_top_entropy(TopEntropyConfig(top_fraction=0.8), batch, none).all()  # ties with the last are taken too


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
