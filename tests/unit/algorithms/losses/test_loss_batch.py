"""Importance ratios and their gradients, what a loss function is given, and additive statistics."""

import math

import pytest
import torch

from gtpo_megatron.algorithms.losses.loss_batch import (
    LOG_RATIO_LIMIT,
    LossInputs,
    first_of_response,
    log_ratio,
    sequence_ratio,
    sum_count,
)

MASK = torch.tensor([[False, True, True], [True, False, True], [False, False, False]])
VALUES = torch.tensor([[9.0, 1.0, 2.0], [3.0, 9.0, 4.0], [9.0, 9.0, 9.0]])


def test_the_first_token_is_the_first_of_the_mask() -> None:
    assert first_of_response(VALUES, MASK).tolist() == [1.0, 3.0, 0.0]
    assert first_of_response(torch.full((3, 3), math.nan), torch.zeros_like(MASK)).tolist() == [0.0] * 3
    assert first_of_response(torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.bool)).tolist() == [0.0, 0.0]
    assert first_of_response(torch.zeros(0, 2), torch.zeros(0, 2, dtype=torch.bool)).shape == (0,)


def test_ratios_of_tokens_and_responses() -> None:
    logs = torch.where(MASK, torch.log(VALUES), 0.0)
    inputs = LossInputs(
        logprobs=logs, old_logprobs=torch.zeros_like(logs), log_ratios=logs, advantages=VALUES, mask=MASK
    )
    torch.testing.assert_close(inputs.ratio, torch.where(MASK, VALUES, 1.0))
    torch.testing.assert_close(inputs.response_ratio(is_geometric=False), torch.tensor([1.5, 3.5, 1.0]))
    torch.testing.assert_close(inputs.response_ratio(is_geometric=True), torch.tensor([2**0.5, 12**0.5, 1.0]))
    assert inputs.response_advantages.tolist() == [1.0, 3.0, 0.0]


def test_sum_and_count_of_what_is_masked_in() -> None:
    values = torch.tensor([1.0, math.nan, 3.0]).requires_grad_()
    result = sum_count(values, torch.tensor([True, False, True]))
    assert (result.total.item(), result.count.item()) == (4.0, 2.0)
    assert result.total.dtype == torch.float64
    assert not result.total.requires_grad


ROWS = torch.tensor([[True, True], [False, False]])


def test_what_is_masked_never_reaches_exp() -> None:
    new = torch.tensor([[-1.0, -2.0], [math.inf, math.nan]]).requires_grad_()
    ratios = log_ratio(new, torch.tensor([[-1.5, -1.0], [0.0, 0.0]]), ROWS)
    assert ratios.tolist() == [[0.5, -1.0], [0.0, 0.0]]
    ratios.exp().sum().backward()
    assert new.grad is not None
    assert bool(torch.isfinite(new.grad).all())


def test_absurd_ratios_are_bounded() -> None:
    ratios = log_ratio(torch.tensor([[0.0, -900.0]]), torch.tensor([[-900.0, 0.0]]), ROWS[:1])
    assert ratios.tolist() == [[LOG_RATIO_LIMIT, -LOG_RATIO_LIMIT]]


@pytest.mark.parametrize("is_geometric", [False, True])
def test_sequence_ratio(is_geometric: bool) -> None:
    logs = torch.tensor([[0.4, -0.2], [0.0, 0.0]], dtype=torch.float64).requires_grad_()
    ratio = sequence_ratio(logs, ROWS, is_geometric=is_geometric)
    w = [math.exp(0.4), math.exp(-0.2)]
    value = math.exp(0.1) if is_geometric else sum(w) / 2
    assert ratio.tolist() == pytest.approx([value, 1.0])
    ratio[0].backward()
    assert logs.grad is not None
    wanted = [value / 2, value / 2] if is_geometric else [w[0] / 2, w[1] / 2]
    assert logs.grad[0].tolist() == pytest.approx(wanted)
