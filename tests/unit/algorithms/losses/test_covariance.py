"""Covariances, what is chosen by them, and the penalty on their tail."""

import math

import pytest
import torch

from gtpo_megatron.algorithms.losses.covariance import (
    clip_cov_loss,
    kl_cov_loss,
)
from gtpo_megatron.algorithms.losses.loss_batch import LossInputs
from gtpo_megatron.config.algorithm import ClipCovConfig, KLCovConfig


def inputs(log_ratios: torch.Tensor, selected: list[bool]) -> LossInputs:
    zeros = torch.zeros_like(log_ratios)
    return LossInputs(
        logprobs=log_ratios,
        old_logprobs=zeros,
        log_ratios=log_ratios,
        advantages=torch.ones_like(log_ratios),
        mask=torch.ones_like(log_ratios, dtype=torch.bool),
        selection=torch.tensor([selected]),
    )


def test_only_selected_tokens_are_held_back() -> None:
    logs = torch.tensor([[0.5, -0.5, 0.0]], dtype=torch.float64, requires_grad=True)
    config = KLCovConfig(kl_coef=2.0)
    loss = kl_cov_loss(config, inputs(logs, [True] * 3))
    free = kl_cov_loss(config, inputs(logs, [False] * 3))
    assert (loss - free)[0].tolist() == pytest.approx([1.0, 1.0, 0.0])
    (loss - free).sum().backward()
    assert logs.grad is not None
    assert logs.grad[0].tolist() == pytest.approx([2.0, -2.0, 0.0])  # at the old policy there is no pull
    assert free[0, 0].item() == pytest.approx(-math.exp(0.5))


def test_clip_cov_drops_the_selected_tokens() -> None:
    logs = torch.tensor([[0.1, 0.1]], dtype=torch.float64, requires_grad=True)
    loss = clip_cov_loss(ClipCovConfig(), inputs(logs, [True, False]))
    assert loss[0].tolist() == pytest.approx([0.0, -math.exp(0.1)])
    loss.sum().backward()
    assert logs.grad is not None
    assert logs.grad[0].tolist() == pytest.approx([0.0, -math.exp(0.1)])
