"""What stands in the place of entropy in the study's controls."""

import pytest
import torch

from gtpo_megatron.algorithms import assign_credit
from gtpo_megatron.companions.study.controls import ControlConfig
from gtpo_megatron.config.algorithm import GTPOConfig
from gtpo_megatron.config.serialize import from_plain, to_plain
from gtpo_megatron.errors import ConfigError, DataError, ShapeError
from recipes import tiny_cpu
from tests.strategies import Batch, random_batch


def test_uniform_weights_are_constant_entropy() -> None:
    batch = random_batch(1, num_groups=3, group_size=5, max_tokens=6)
    constant = Batch([[0.7] * len(row) for row in batch.entropies], batch.rewards, batch.groups)
    uniform = assign_credit(ControlConfig(weight_source="uniform"), **batch.arguments()).advantages
    assert torch.equal(uniform, assign_credit(GTPOConfig(), **constant.arguments()).advantages)


def test_surprisal_takes_the_place_of_entropy() -> None:
    batch = random_batch(2, num_groups=3, group_size=5, max_tokens=6)
    arguments = batch.arguments()
    swapped = {**arguments, "token_entropy": torch.ones_like(arguments["token_entropy"])}
    config = ControlConfig(weight_source="surprisal")
    surprisal = assign_credit(config, **swapped, old_logprobs=-arguments["token_entropy"])
    assert torch.equal(surprisal.advantages, assign_credit(GTPOConfig(), **arguments).advantages)
    assert surprisal.metrics["credit/entropy_correct_nats"] == 1.0  # which is that of the policy
    with pytest.raises(ShapeError, match="old_logprobs: got None, needed for weight_source='surprisal'"):
        assign_credit(config, **arguments)
    config, certain = (
        ControlConfig(weight_source="surprisal", entropy_floor=0.0),
        torch.zeros_like(swapped["token_entropy"]),
    )
    with pytest.raises(DataError, match=r"is 0 with entropy_floor=0.0"):
        assign_credit(config, **arguments, old_logprobs=certain)


def test_one_shaped_side_leaves_the_other_uniform() -> None:
    batch = Batch([[1.0, 2.0], [3.0, 0.5], [1.0], [4.0, 0.25]], [1, 1, 0, 0], [0] * 4)
    both = assign_credit(GTPOConfig(), **batch.arguments()).shaped_rewards
    positive = assign_credit(ControlConfig(shaped_sides="positive"), **batch.arguments()).shaped_rewards
    negative = assign_credit(ControlConfig(shaped_sides="negative"), **batch.arguments()).shaped_rewards
    assert torch.equal(positive[:2], both[:2])
    assert torch.equal(negative[2:], both[2:])
    mask = batch.arguments()["response_mask"]
    assert torch.equal(positive[2:], torch.where(mask[2:], torch.tensor(-1.1), 0.0))
    assert torch.equal(negative[:2], torch.where(mask[:2], torch.tensor(1.1), 0.0))


def test_shuffling_is_seeded_and_keeps_each_response_its_entropies() -> None:
    batch = Batch([[0.1 * t + i for t in range(1, 30)] for i in range(4)], [1, 1, 0, 0], [0] * 4)
    arguments = batch.arguments()
    plain = assign_credit(GTPOConfig(), **arguments).advantages
    first, again, other = (
        assign_credit(ControlConfig(weight_source="shuffled", weight_seed=seed), **arguments).advantages
        for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, plain)
    assert not torch.equal(first, other)
    alone = ControlConfig(weight_source="shuffled", entropy_axis="response")
    rows = assign_credit(alone, **arguments).shaped_rewards.sort(1).values
    whole = assign_credit(GTPOConfig(entropy_axis="response"), **arguments).shaped_rewards
    assert torch.equal(rows, whole.sort(1).values)


def test_a_run_of_a_control_reloads() -> None:
    plain = to_plain(tiny_cpu.gtpo()) | {"algorithm": to_plain(ControlConfig(weight_source="shuffled", weight_seed=7))}
    assert plain["algorithm"]["kind"] == "gtpo_megatron.companions.study.controls:ControlConfig"
    assert from_plain(plain, "a run").algorithm == ControlConfig(weight_source="shuffled", weight_seed=7)


def test_a_mean_over_turns_is_the_mean_over_responses_of_their_turns_means() -> None:
    """From the surrogate at a ratio of 1, whose gradient is the weighted advantages: two turns, one turn, none."""
    batch = random_batch(3, num_groups=1, group_size=3, max_tokens=1)
    arguments = batch.arguments()
    mask = torch.tensor([[1, 0, 1, 1, 1, 0], [1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]], dtype=torch.bool)
    arguments |= {"response_mask": mask, "token_entropy": torch.rand(3, 6) + 0.1, "rewards": torch.tensor([1.0, 0, 0])}
    alike = ControlConfig(loss_denominator="response", turns_weigh_alike=True)
    plain = assign_credit(GTPOConfig(loss_denominator="response"), **arguments).advantages
    found = assign_credit(alike, **arguments).advantages
    assert found[0, :1].sum() == pytest.approx(float(plain[0, :1].mean()) * 4 / 2)
    assert found[0, 2:5].sum() == pytest.approx(float(plain[0, 2:5].mean()) * 4 / 2)
    assert torch.equal(found[1:], plain[1:])
    with pytest.raises(ConfigError, match="turns_weigh_alike=true with loss_denominator='batch': expected 'response'"):
        ControlConfig(turns_weigh_alike=True)
