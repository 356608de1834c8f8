"""Ranks that share a sequence's tokens see all of them, and each keeps the gradient of its own."""

import pytest
import torch
import torch.distributed as dist

from gtpo_megatron.distributed.context_parallel import gather_tokens
from tests.dist_utils import run_ranks

pytestmark = pytest.mark.distributed

PLACES = [[0, 5, 6], [], [4, 1, 2, 3]]  # in any order, and a rank may hold none
VALUES = torch.tensor([-0.1, -2.0e-20, -3.3e9, -0.7, -1e-45, -5.0, -6.1])


def gathered(rank, world_size):
    places = torch.tensor(PLACES[rank], dtype=torch.int64)
    held = VALUES[places].requires_grad_()
    whole = gather_tokens(torch.stack([held, 2 * held]), places, num_tokens=7, cp_group=dist.group.WORLD)
    # a loss that is not a sum over tokens, equal on all ranks
    loss = (whole[0] - whole[1]).tanh().sum() ** 2
    loss.backward()
    return whole.detach(), float(loss.detach()), held.grad


@pytest.mark.slow
def test_every_rank_sees_every_token_and_keeps_the_gradient_of_its_own():
    reference = VALUES.clone().requires_grad_()
    loss = reference.neg().tanh().sum() ** 2
    loss.backward()
    for rank, (whole, value, grad) in enumerate(run_ranks(gathered, 3)):
        assert torch.equal(whole, torch.stack([VALUES, 2 * VALUES]))
        assert value == float(loss.detach())
        torch.testing.assert_close(grad, reference.grad[PLACES[rank]])


def test_one_rank_needs_no_group():
    values = torch.randn(2, 3)
    assert gather_tokens(values, torch.arange(3), num_tokens=3, cp_group=None) is values
