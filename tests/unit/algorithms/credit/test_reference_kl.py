"""The divergence from a reference policy in the reward: scalar loops, every algorithm, any sharding."""

import dataclasses

import pytest
import torch

from gtpo_megatron.algorithms import assign_credit
from gtpo_megatron.algorithms.registry import BUILT_IN
from gtpo_megatron.config.algorithm import DistillConfig, GRPOConfig, ReferenceKLConfig, RLOOConfig
from gtpo_megatron.errors import ShapeError
from tests.reference import grpo, rloo
from tests.reference import reference_kl as reference
from tests.strategies import random_batch

COEF = 0.2


def log_probs(mask, seed):
    return torch.where(mask, -2 * torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed)), 0.0)


def rows_of(values, mask):
    return [row[kept].tolist() for row, kept in zip(values, mask, strict=True)]


def credit_of(config, arguments, old, ref):
    return assign_credit(config, **{**arguments, "old_logprobs": old, "ref_logprobs": ref})


@pytest.fixture
def made():
    batch = random_batch(3, num_groups=4, group_size=4, max_tokens=6)
    arguments = batch.arguments()
    mask = arguments["response_mask"]
    return arguments, log_probs(mask, 1), log_probs(mask, 2)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize(
    ("config", "scalar"), [(GRPOConfig(), grpo.advantages), (RLOOConfig(), rloo.advantages)], ids=["grpo", "rloo"]
)
def test_it_is_subtracted_from_the_outcome(made, config, scalar, kind):
    arguments, old, ref = made
    mask = arguments["response_mask"]
    config = dataclasses.replace(config, reference_kl=ReferenceKLConfig(coef=COEF, place="reward", estimator=kind))
    found = credit_of(config, arguments, old, ref)
    lost = reference.of_responses(kind, rows_of(old, mask), rows_of(ref, mask))
    entropies = rows_of(arguments["token_entropy"], mask)
    rewards = [float(r) - COEF * kl for r, kl in zip(arguments["rewards"], lost, strict=True)]
    wanted = scalar(entropies, rewards, arguments["group_ids"].tolist())
    for row, expected in enumerate(wanted):
        got = found.advantages[row][mask[row]].tolist()
        if got:  # RLOO's loop repeats the value on every token
            value = expected[0] if isinstance(expected, list) else expected
            assert got == pytest.approx([value] * len(got), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("record", BUILT_IN, ids=lambda record: record.config.__name__)
def test_every_algorithm_counts_it_as_it_counts_the_outcome(made, record):
    """The same credit as with rewards that have lost it already, but for which responses are correct."""
    arguments, old, ref = made
    mask = arguments["response_mask"]
    plain, coef = DistillConfig(reward_coef=1.0) if record.config is DistillConfig else record.config(), 1e-3
    arguments["teacher_logprobs"] = log_probs(mask, 3)
    config = dataclasses.replace(plain, reference_kl=ReferenceKLConfig(coef=coef, place="reward", estimator="k1"))
    found = credit_of(config, arguments, old, ref)
    lost = reference.of_responses("k1", rows_of(old, mask), rows_of(ref, mask))
    shaped = assign_credit(plain, **{**arguments, "old_logprobs": old}).shaped_rewards
    difference = torch.where(mask, coef * torch.tensor(lost)[:, None], 0.0)
    torch.testing.assert_close(shaped - found.shaped_rewards, difference, rtol=1e-3, atol=2e-6)


def test_a_policy_that_is_its_reference_loses_nothing(made):
    arguments, old, _ = made
    config = GRPOConfig(reference_kl=ReferenceKLConfig(coef=COEF, place="reward", estimator="k1"))
    same = credit_of(config, arguments, old, old)
    without = credit_of(GRPOConfig(), arguments, old, None)
    assert torch.equal(same.advantages, without.advantages)


def test_the_padding_and_the_order_of_rows_change_no_bit(made):
    arguments, old, ref = made
    config = GRPOConfig(reference_kl=ReferenceKLConfig(coef=COEF, place="reward", estimator="k3"))
    found = credit_of(config, arguments, old, ref)
    order = torch.randperm(len(old), generator=torch.Generator().manual_seed(4))

    def padded(matrix):
        return torch.nn.functional.pad(matrix[order], (0, 37))

    moved = {name: padded(value) if value.ndim == 2 else value[order] for name, value in arguments.items()}
    again = credit_of(config, moved, padded(old), padded(ref))
    assert torch.equal(again.advantages[:, : old.shape[1]], found.advantages[order])


def test_missing_log_probs_are_one_line(made):
    arguments, old, ref = made
    config = GRPOConfig(reference_kl=ReferenceKLConfig(coef=COEF, place="reward"))
    with pytest.raises(ShapeError, match="ref_logprobs: got None, needed for reference_kl.coef=0.2"):
        credit_of(config, arguments, old, None)
    with pytest.raises(ShapeError, match="old_logprobs: got None, needed for reference_kl in the reward"):
        credit_of(config, arguments, None, ref)
