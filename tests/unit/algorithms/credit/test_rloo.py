"""RLOO against loops, by hand, and where there is no baseline."""

import math

import pytest
import torch
from hypothesis import given

from gtpo_megatron.algorithms import policy_loss
from gtpo_megatron.config.algorithm import RLOOConfig
from tests.reference import rloo as reference
from tests.strategies import Batch, batches
from tests.unit.algorithms.rival_checks import Problem, advantages, by_hand, check_invariances, lists


@given(batches())
def test_credit_equals_the_loops(batch: Batch) -> None:
    wanted = reference.advantages(batch.entropies, batch.rewards, batch.groups)
    for row, other in zip(advantages(RLOOConfig(), batch), wanted, strict=True):
        assert row == pytest.approx(other, abs=1e-6)


@pytest.mark.parametrize(
    ("rewards", "groups", "lengths"),
    [([1.0], [0], [2]), ([0.1] * 3, [4] * 3, [1, 2, 3]), ([1.0, 0.0], [0, 0], [2, 0]), ([0.0], [0], [0])],
)
def test_without_a_baseline_or_a_difference_there_is_no_advantage(rewards, groups, lengths) -> None:
    got = by_hand(RLOOConfig(), [[0.5] * n for n in lengths], rewards, groups)
    assert got == [[0.0] * n for n in lengths]


def test_the_loss_is_reinforce_of_whole_responses() -> None:
    problem = Problem(3)
    problem.tensors["old"] = problem.tensors["new"] = problem.tensors["new"].clamp(max=0)  # the first update
    got = problem.run(RLOOConfig())
    logprobs, credit = lists(problem.tensors["new"], problem.batch), lists(got["advantages"], problem.batch)
    assert got["loss"].item() == pytest.approx(-reference.objective(logprobs, credit))
    num_live = sum(map(bool, problem.batch.entropies))
    torch.testing.assert_close(got["gradient"], -got["advantages"].double() / num_live)


def test_a_later_update_weighs_by_the_ratio_and_clips_nothing() -> None:
    logprobs = torch.tensor([[-1.0, -5.0]], dtype=torch.float64, requires_grad=True)
    terms = policy_loss(
        RLOOConfig(),
        logprobs=logprobs,
        old_logprobs=torch.tensor([[-3.0, -1.0]], dtype=torch.float64),
        advantages=torch.tensor([[2.0, 2.0]]),
        response_mask=torch.ones(1, 2, dtype=torch.bool),
    )
    terms.loss_sum.backward()
    assert terms.weight.item() == 1
    assert logprobs.grad is not None
    assert logprobs.grad[0].tolist() == pytest.approx([-2 * math.exp(2), -2 * math.exp(-4)])


def test_order_cuts_and_foreign_tokens_change_nothing() -> None:
    check_invariances(RLOOConfig())
