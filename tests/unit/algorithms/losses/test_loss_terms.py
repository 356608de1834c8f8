"""Additive statistics."""

import math

import torch

from gtpo_megatron.algorithms.losses.loss_terms import sum_count


def test_sum_and_count_of_what_is_masked_in() -> None:
    values = torch.tensor([1.0, math.nan, 3.0]).requires_grad_()
    result = sum_count(values, torch.tensor([True, False, True]))
    assert (result.total.item(), result.count.item()) == (4.0, 2.0)
    assert result.total.dtype == torch.float64
    assert not result.total.requires_grad
