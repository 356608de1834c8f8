"""Covariances, what is chosen by them, and the penalty on their tail."""

import math

import pytest
import torch

from gtpo_megatron.algorithms.losses.covariance import (
    clip_cov_loss,
    kl_cov_loss,
    select_clip_cov,
    select_kl_cov,
    token_covariance,
)
from gtpo_megatron.algorithms.losses.loss_batch import LossInputs
from gtpo_megatron.config.algorithm import ClipCovConfig, KLCovConfig
from tests.unit.algorithms.parts import batch_of, column

BATCH = batch_of([2, 1, 1], [1.0] * 4, old_logprobs=column(-1.0, -3.0, -1.0, -3.0))
ADVANTAGES = column(2.0, 0.5, -1.0, 2.5)


def test_covariance() -> None:
    assert token_covariance(BATCH, ADVANTAGES).tolist() == [1.0, 0.5, -2.0, -1.5]


def test_selections() -> None:
    assert select_kl_cov(KLCovConfig(penalised_fraction=0.5), BATCH, ADVANTAGES).tolist() == [True, True, False, False]
    assert select_kl_cov(KLCovConfig(penalised_fraction=0.0), BATCH, ADVANTAGES).tolist() == [False] * 4
    chosen = {
        tuple(select_clip_cov(config, BATCH, ADVANTAGES).tolist())
        for config in (ClipCovConfig(clip_fraction=0.25, cov_low=-1.6, cov_high=0.5, seed=seed) for seed in range(30))
    }
    assert chosen == {(False, True, False, False), (False, False, False, True)}  # one token, of those in the band


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
