import pytest
import torch

from gtpo_megatron.algorithms.losses.nll import nll_statistic, nll_sum
from tests.reference.supervised import mean_nll


def test_parts_of_a_batch_add_up_to_the_mean_over_its_tokens():
    torch.manual_seed(0)
    logprobs, mask = -torch.rand(3, 5, dtype=torch.float64), torch.rand(3, 5) < 0.6
    parts = [nll_sum(row[own]) for row, own in zip(logprobs, mask, strict=True)]
    assert float(sum(parts) / mask.sum()) == pytest.approx(mean_nll(logprobs.tolist(), mask.tolist()), rel=1e-14)


def test_every_token_has_the_same_gradient():
    logprobs = torch.tensor([-1.0, -2.5, -0.5], requires_grad=True)
    (nll_sum(logprobs) / 3).backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, torch.full((3,), -1 / 3))


def test_without_tokens_backward_runs_all_the_same():
    hidden = torch.ones(2, requires_grad=True)
    nll_sum((hidden * 2)[:0]).backward()
    assert hidden.grad is not None
    assert hidden.grad.tolist() == [0.0, 0.0]


def test_the_report_is_of_float64_and_has_no_gradient():
    logprobs = torch.full((1 << 20,), -0.1, requires_grad=True)
    found = nll_statistic(logprobs)
    assert (found.dtype, found.requires_grad) == (torch.float64, False)
    assert float(found) == pytest.approx((1 << 20) * float(torch.tensor(0.1)), rel=1e-12)
