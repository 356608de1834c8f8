"""Covariances and the penalty on their tail."""

import math

import pytest
import torch
from gtpo_megatron.algorithms.covariance import kl_cov_loss, token_covariance


def test_covariance() -> None:
    got = token_covariance(torch.tensor([-1.0, -3.0]), torch.tensor([2.0, 0.5]), -2.0, 1.0)
    assert got.tolist() == [1.0, 0.5]


def test_only_selected_tokens_are_held_back() -> None:
    logs = torch.tensor([0.5, -0.5, 0.0], dtype=torch.float64, requires_grad=True)
    selected = torch.tensor([True, True, True])
    loss = kl_cov_loss(logs.exp(), logs, torch.ones(3).double(), selected, kl_coef=2.0)
    free = kl_cov_loss(logs.exp(), logs, torch.ones(3).double(), ~selected, kl_coef=2.0)
    assert (loss - free).tolist() == pytest.approx([1.0, 1.0, 0.0])
    (loss - free).sum().backward()
    assert logs.grad is not None
    assert logs.grad.tolist() == pytest.approx([2.0, -2.0, 0.0])  # at the old policy there is no pull
    assert free[0].item() == pytest.approx(-math.exp(0.5))
