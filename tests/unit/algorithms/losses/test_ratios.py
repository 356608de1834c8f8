"""Importance ratios and their gradients."""

import math

import pytest
import torch

from gtpo_megatron.algorithms.losses.ratios import LOG_RATIO_LIMIT, log_ratio, sequence_ratio

MASK = torch.tensor([[True, True], [False, False]])


def test_what_is_masked_never_reaches_exp() -> None:
    new = torch.tensor([[-1.0, -2.0], [math.inf, math.nan]]).requires_grad_()
    ratios = log_ratio(new, torch.tensor([[-1.5, -1.0], [0.0, 0.0]]), MASK)
    assert ratios.tolist() == [[0.5, -1.0], [0.0, 0.0]]
    ratios.exp().sum().backward()
    assert new.grad is not None
    assert bool(torch.isfinite(new.grad).all())


def test_absurd_ratios_are_bounded() -> None:
    ratios = log_ratio(torch.tensor([[0.0, -900.0]]), torch.tensor([[-900.0, 0.0]]), MASK[:1])
    assert ratios.tolist() == [[LOG_RATIO_LIMIT, -LOG_RATIO_LIMIT]]


@pytest.mark.parametrize("is_geometric", [False, True])
def test_sequence_ratio(is_geometric: bool) -> None:
    logs = torch.tensor([[0.4, -0.2], [0.0, 0.0]], dtype=torch.float64).requires_grad_()
    ratio = sequence_ratio(logs, MASK, is_geometric=is_geometric)
    w = [math.exp(0.4), math.exp(-0.2)]
    value = math.exp(0.1) if is_geometric else sum(w) / 2
    assert ratio.tolist() == pytest.approx([value, 1.0])
    ratio[0].backward()
    assert logs.grad is not None
    wanted = [value / 2, value / 2] if is_geometric else [w[0] / 2, w[1] / 2]
    assert logs.grad[0].tolist() == pytest.approx(wanted)
