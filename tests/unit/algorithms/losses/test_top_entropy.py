"""Gradient from the tokens of highest entropy only."""

import torch

from gtpo_megatron.algorithms.losses.loss_batch import LossInputs
from gtpo_megatron.algorithms.losses.selection import SelectionBatch
from gtpo_megatron.algorithms.losses.top_entropy import select_top_entropy, top_entropy_loss
from gtpo_megatron.algorithms.sums import Reduction
from gtpo_megatron.config.algorithm import TopEntropyConfig
from tests.unit.algorithms.parts import column, tokens_of


def test_selection() -> None:
    batch = SelectionBatch(
        tokens=tokens_of([3, 2]),
        entropy=column(1.0, -5e-5, 0.5, 2.0, 0.0),
        old_logprobs=column(*[-1.0] * 5),
        advantages=column(*[0.0] * 5),
        num_tokens=5,
        reduction=Reduction(),
    )
    top = select_top_entropy(TopEntropyConfig(top_fraction=0.4), batch)
    assert top.tolist() == [True, False, False, True, False]
    assert select_top_entropy(TopEntropyConfig(top_fraction=0.8), batch).all()  # ties with the last are taken too


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
