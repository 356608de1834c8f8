"""On-policy distillation: the published formulas, the scalar loops, whose tokens count, and the gradient on average."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gtpo_megatron.algorithms import assign_credit, policy_loss
from gtpo_megatron.config.algorithm import DistillConfig, GRPOConfig
from gtpo_megatron.config.algorithm.base import NoLengthPenalty, SoftOverlongPenalty
from gtpo_megatron.errors import ConfigError, DataError, ShapeError
from tests.reference import distill as reference
from tests.reference import grpo
from tests.strategies import Batch, batches, random_batch
from tests.unit.algorithms.rival_checks import check_invariances, lists, old_logprobs


def teacher_logprobs(batch: Batch) -> torch.Tensor:
    return old_logprobs(batch, seed=7)


def credit_of(config, batch, **changes):
    given_ = {"old_logprobs": old_logprobs(batch), "teacher_logprobs": teacher_logprobs(batch)}
    return assign_credit(config, **{**batch.arguments(), **given_, **changes})


@given(batches(), st.sampled_from([1.0, 0.3]))
def test_alone_it_is_tinkers_and_trls_formula(batch: Batch, coef: float) -> None:
    found = credit_of(DistillConfig(teacher_coef=coef), batch)
    student, teacher = (lists(one(batch), batch) for one in (old_logprobs, teacher_logprobs))
    tinker = reference.tinker(student, teacher, kl_penalty_coef=coef)
    trl = [[coef * value for value in row] for row in reference.minillm(student, teacher, gamma=0.0)]
    for got, earned, wanted, also in zip(
        lists(found.advantages, batch), lists(found.shaped_rewards, batch), tinker, trl, strict=True
    ):
        assert got == pytest.approx(wanted, abs=1e-6)
        assert got == pytest.approx(also, abs=1e-6)
        assert earned == got


@given(
    batches(),
    st.sampled_from([0.0, 0.5, 2.0]),
    st.sampled_from([0.0, 0.25, 1.0]),
    st.sampled_from(["position", "response", "matrix"]),
)
def test_with_rewards_and_entropies_it_equals_the_loops(batch, reward_coef, entropy_coef, axis) -> None:
    config = DistillConfig(teacher_coef=0.7, reward_coef=reward_coef, entropy_coef=entropy_coef, entropy_axis=axis)
    student, teacher = (lists(one(batch), batch) for one in (old_logprobs, teacher_logprobs))
    wanted = reference.advantages(
        student,
        teacher,
        reference.weights(batch.entropies, batch.groups, entropy_coef, axis),
        grpo.advantages(batch.entropies, batch.rewards, batch.groups),
        teacher_coef=0.7,
        reward_coef=reward_coef,
    )
    for got, row in zip(lists(credit_of(config, batch).advantages, batch), wanted, strict=True):
        assert got == pytest.approx(row, rel=1e-5, abs=1e-5)


def test_by_hand() -> None:
    """Two responses: of entropies 1 and 3 at the first position, alone at the second."""
    batch = Batch([[1.0, 2.0], [3.0]], [1.0, 0.0], [4, 4])
    logprobs = {
        "old_logprobs": torch.tensor([[-1.0, -2.0], [-3.0, 0.0]]),
        "teacher_logprobs": torch.tensor([[-2.0, -0.5], [-1.0, 0.0]]),
    }
    for config, wanted in (
        (DistillConfig(), [-1.0, 1.5, 2.0]),
        (DistillConfig(entropy_coef=1.0), [-0.5, 1.5, 3.0]),
        (DistillConfig(entropy_coef=0.5), [-0.75, 1.5, 2.5]),
        (DistillConfig(teacher_coef=2.0, reward_coef=0.5), [-1.5, 3.5, 3.5]),
    ):
        found = assign_credit(config, **batch.arguments(), **logprobs)
        own = batch.arguments()["response_mask"]
        assert found.advantages[own].tolist() == pytest.approx(wanted, abs=1e-6), config


def test_the_rewards_part_is_grpos() -> None:
    """Where teacher and student agree nothing else is left, its length penalty included."""
    batch = random_batch(2, num_groups=3, group_size=4, max_tokens=9)
    penalty = SoftOverlongPenalty(max_tokens=8, buffer_tokens=4, applies_to="all")
    same = {"teacher_logprobs": old_logprobs(batch)}
    for length_penalty in (NoLengthPenalty(), penalty):
        found = credit_of(DistillConfig(reward_coef=1.0, length_penalty=length_penalty), batch, **same)
        wanted = credit_of(GRPOConfig(length_penalty=length_penalty), batch)
        assert torch.equal(found.advantages, wanted.advantages)
        assert found.advantages.any()


def test_tokens_of_others_get_none_and_change_nobodys() -> None:
    """Turns of an environment between two of the policy's, with anything at its tokens; order, cuts, shards."""
    check_invariances(DistillConfig())
    check_invariances(DistillConfig(reward_coef=0.5, entropy_coef=1.0))
    mask = torch.tensor([[True, False, False, True]])
    found = assign_credit(
        DistillConfig(entropy_coef=1.0, entropy_axis="turn"),
        rewards=torch.tensor([1.0]),
        token_entropy=torch.tensor([[1.0, math.nan, 9.0, 3.0]]),
        response_mask=mask,
        group_ids=torch.tensor([0]),
        old_logprobs=torch.tensor([[-1.0, math.nan, -9.0, -1.0]]),
        teacher_logprobs=torch.tensor([[-2.0, math.inf, -1.0, -3.0]]),
    )
    assert found.advantages.tolist() == [[-1.0, 0.0, 0.0, -2.0]]


def test_a_branch_is_compared_at_its_own_position() -> None:
    """A response of three tokens whose last follows the prompt: it is at the first position, beside another's first."""
    arguments = {
        "rewards": torch.tensor([1.0, 0.0]),
        "token_entropy": torch.tensor([[1.0, 5.0, 2.0], [3.0, 0.0, 0.0]]),
        "response_mask": torch.tensor([[True, True, True], [True, False, False]]),
        "group_ids": torch.tensor([0, 0]),
        "old_logprobs": torch.tensor([[-2.0, -2.0, -2.0], [-2.0, 0.0, 0.0]]),
        "teacher_logprobs": torch.tensor([[-1.0, -1.0, -1.0], [-1.0, 0.0, 0.0]]),
        "branches": [[(2, 0)], []],
    }
    found = assign_credit(DistillConfig(entropy_coef=1.0), **arguments)
    assert found.advantages[0].tolist() == pytest.approx([0.5, 1.0, 1.0])  # 1, 2 and 3 at the first position
    assert found.advantages[1, 0] == pytest.approx(1.5)
    alone = assign_credit(DistillConfig(), **arguments)
    assert alone.advantages.tolist() == [[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]]


def test_the_gradient_on_average_is_that_of_the_reverse_kl() -> None:
    """Over all outcomes of one position, each as often as the student samples it: TRL's GKD loss with ``beta=1``."""
    torch.manual_seed(5)
    logits, teacher = torch.randn(7, dtype=torch.float64, requires_grad=True), torch.randn(7, dtype=torch.float64)
    student = torch.log_softmax(logits, 0)
    target = torch.log_softmax(teacher, 0)
    (kl,) = torch.autograd.grad((student.exp() * (student - target)).sum(), logits, retain_graph=True)
    old = student.detach()[:, None]
    arguments = {
        "response_mask": torch.ones(7, 1, dtype=torch.bool),
        "group_ids": torch.zeros(7, dtype=torch.int64),
        "old_logprobs": old,
    }
    config = DistillConfig(clip_eps_low=0.99, clip_eps_high=9.0)
    credit = assign_credit(
        config, rewards=torch.zeros(7), token_entropy=torch.ones(7, 1), teacher_logprobs=target[:, None], **arguments
    )
    weighed = credit.advantages.double() * old.exp() * 7  # each of seven counts a seventh
    terms = policy_loss(config, logprobs=student[:, None], advantages=weighed, **arguments)
    (found,) = torch.autograd.grad(terms.loss_sum / terms.weight, logits)
    torch.testing.assert_close(found, kl, rtol=1e-5, atol=1e-7)


def test_missing_and_bad_log_probs_are_one_line() -> None:
    batch = random_batch(2, num_groups=2, group_size=2, max_tokens=3)
    given_ = teacher_logprobs(batch)
    own = batch.arguments()["response_mask"]
    for changes, error, message in (
        ({"teacher_logprobs": None}, ShapeError, "teacher_logprobs: got None, needed for DistillConfig"),
        ({"old_logprobs": None}, ShapeError, "old_logprobs: got None, needed for DistillConfig"),
        ({"teacher_logprobs": given_[:1]}, ShapeError, "teacher_logprobs: got shape"),
        ({"teacher_logprobs": given_.bfloat16()}, ShapeError, "teacher_logprobs: got torch.bfloat16"),
        ({"teacher_logprobs": torch.where(own, 0.5, 0.0)}, DataError, r"teacher_logprobs\[.*\] = 0.5"),
        ({"teacher_logprobs": torch.where(own, -math.inf, 0.0)}, DataError, r"teacher_logprobs\[.*\] = -inf"),
    ):
        with pytest.raises(error, match=message):
            credit_of(DistillConfig(), batch, **changes)


def test_a_share_of_entropies_is_at_most_one() -> None:
    with pytest.raises(ConfigError, match=r"entropy_coef=1.5: must lie in \[0, 1\]"):
        DistillConfig(entropy_coef=1.5)
