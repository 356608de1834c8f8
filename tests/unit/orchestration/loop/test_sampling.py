"""Dynamic sampling over an engine whose outcomes are written down beforehand."""

import logging

import pytest
import torch

from gtpo_megatron.batch import Problem, PromptBatch, RewardBatch, RolloutBatch, mask_of_lengths, take_rows
from gtpo_megatron.config.algorithm import DAPOConfig, DynamicSamplingConfig, GTPOConfig
from gtpo_megatron.config.rollout import RolloutConfig
from gtpo_megatron.errors import ConfigError, RolloutError, ShapeError
from gtpo_megatron.observability.metrics import to_scalars
from gtpo_megatron.observability.timers import StageTimers
from gtpo_megatron.orchestration.loop.sampling import refill_size, sample_groups
from gtpo_megatron.orchestration.stages.rollouts import RolloutHandle
from gtpo_megatron.orchestration.stages.stages import MemorySharing, Stages
from gtpo_megatron.weights.push.sync import WeightSync

ROLLOUT = RolloutConfig(group_size=2)


def batch(group_ids, samples):
    groups = [group for group in group_ids for _ in range(samples)]
    lengths = torch.tensor([1 + group % 3 for group in groups])
    width = int(lengths.max())
    tokens = torch.tensor(groups)[:, None].repeat(1, width)
    return RolloutBatch(
        prompt_ids=torch.zeros(len(groups), 1, dtype=torch.int64),
        prompt_lengths=torch.ones(len(groups), dtype=torch.int64),
        response_ids=tokens,
        response_lengths=lengths,
        loss_mask=mask_of_lengths(lengths, width),
        rollout_logprobs=torch.zeros(len(groups), width),
        group_ids=torch.tensor(groups),
        truncated=torch.zeros(len(groups), dtype=torch.bool),
        policy_version=0,
    )


class WrittenDown:
    """Engine and reward in one: group ``g`` gets the outcomes ``outcomes[g]``; None is a response without a verdict."""

    num_restarts = 0

    def unattended(self):
        return self

    def replace_lost(self):
        pass

    def abandon(self):
        pass

    def store(self, rollouts):
        return RolloutHandle.of(rollouts)

    def __init__(self, outcomes):
        self.outcomes = outcomes
        self.asked = []

    def generate(self, prompts, sampling, *, samples_per_prompt, seed):
        self.asked.append(len(prompts.problems))
        rollouts = batch(prompts.group_ids, samples_per_prompt)
        return RolloutHandle.of(rollouts)

    def grade(self, rollouts, prompts):
        values = [value for group in prompts.group_ids for value in self.outcomes[group]]
        return RewardBatch(
            rewards=torch.tensor([float(value or 0) for value in values]),
            failed=torch.tensor([value is None for value in values]),
        )


def sample(outcomes, algorithm, num_prompts, **more):
    world = WrittenDown(outcomes)
    drawn = iter(range(len(outcomes)))

    def draw(num):
        groups = tuple(next(drawn) for _ in range(num))
        problems = tuple(Problem(problem_id=str(g), prompt_ids=(1,), answer=str(g)) for g in groups)
        return PromptBatch(problems=problems, group_ids=groups)

    stages = Stages(
        engine=world,
        grade=world.grade,
        trainer=None,
        weight_sync=WeightSync(None, None),
        memory_sharing=MemorySharing(None, None, is_colocated=False, timers=StageTimers()),
        timers=StageTimers(),
        open_link=lambda _: None,
    )
    return sample_groups(draw, stages, ROLLOUT, algorithm, num_prompts=num_prompts, seed=0, **more), world


def dynamic(max_refills=10):
    return GTPOConfig(dynamic_sampling=DynamicSamplingConfig(enabled=True, max_refills=max_refills))


def test_rewards_that_differ_are_kept_where_none_is_correct():
    groups = [(0.2, 0.4), (0.3, 0.3), (0.1, 0.9), (0.0, 0.45)]
    rule = DynamicSamplingConfig(enabled=True, keep="spread", min_spread=0.1, max_mean=0.45)
    sampled, world = sample(groups, GTPOConfig(dynamic_sampling=rule), 2)
    assert sampled.prompts.group_ids == (0, 3)
    assert world.asked == [2, 2]
    assert to_scalars(sampled.metrics)["rollout/groups_taught_frac"] == 0.5


def test_every_group_that_was_sampled_is_noted_with_its_problem():
    noted = []
    sample([(1, 1), (0, None), (1, 0), (None, None)], dynamic(), 1, note=noted.append)
    assert noted == [{"0": (2, 2)}, {"1": (0, 1)}, {"2": (1, 2)}]


def test_the_share_that_teaches_is_told_without_dynamic_sampling_too():
    sampled, _ = sample([(1, 1), (0, 0), (1, 0), (0, 1)], GTPOConfig(), 4)
    assert to_scalars(sampled.metrics)["rollout/groups_taught_frac"] == 0.5


def test_a_band_that_is_empty_is_refused():
    with pytest.raises(ConfigError, match="min_mean=0.6 exceeds max_mean=0.4"):
        DynamicSamplingConfig(min_mean=0.6, max_mean=0.4)


def test_without_dynamic_sampling_every_group_stays():
    sampled, world = sample([(1, 1), (0, 0), (1, 0)], GTPOConfig(), 3)
    assert sampled.prompts.group_ids == (0, 1, 2)
    assert world.asked == [3]
    assert "rollout/refills_count" not in sampled.metrics


@pytest.mark.parametrize("algorithm", [dynamic(), DAPOConfig()])
def test_groups_without_signal_are_replaced_until_there_are_enough(algorithm):
    outcomes = [(1, 1), (0, 1), (0, 0), (None, 1), (1, 0), (0, 0), (0, 1), (1, 1), (1, 0)]
    sampled, world = sample(outcomes, algorithm, 3)
    assert world.asked == [3, 3, 3]  # one of three was kept, then two of six: two and one are expected of three
    assert sampled.prompts.group_ids == (1, 4, 6)  # in the order of drawing; 8 is more than the step takes
    assert [problem.answer for problem in sampled.prompts.problems] == ["1", "4", "6"]
    assert sampled.rollouts.group_ids.tolist() == [1, 1, 4, 4, 6, 6]
    assert sampled.rewards.rewards.tolist() == [0, 1, 1, 0, 0, 1]
    fetched = sampled.rollouts.fetch()
    assert [int(row[0]) for row in fetched.response_ids] == [1, 1, 4, 4, 6, 6]
    assert fetched.response_lengths.tolist() == [2, 2, 2, 2, 1, 1]
    scalars = to_scalars(sampled.metrics)
    assert scalars["rollout/refills_count"] == 2
    assert scalars["rollout/groups_dropped_count"] == 5
    assert scalars["rollout/groups_surplus_count"] == 1
    # what was dropped still counts in what was measured: 17 verdicts, 9 of them correct
    assert scalars["rollout/reward_mean"] == pytest.approx(9 / 17)


def test_half_of_the_groups_take_few_rounds():
    """A refill of exactly what is missing took eight rounds of 128 prompts."""
    outcomes = [(0, 1) if is_mixed else (1, 1) for is_mixed in torch.randint(2, (1000,)).tolist()]
    sampled, world = sample(outcomes, dynamic(), 128)
    assert len(world.asked) <= 4
    mixed = [group for group, outcome in enumerate(outcomes) if outcome == (0, 1)]
    assert list(sampled.prompts.group_ids) == mixed[:128]
    scalars = to_scalars(sampled.metrics)
    assert sum(world.asked) == 128 + scalars["rollout/groups_dropped_count"] + scalars["rollout/groups_surplus_count"]


def test_a_refill_is_what_is_expected_to_be_enough_and_never_more_than_a_step():
    def size(num_missing, num_kept, num_drawn):
        return refill_size(num_missing, num_kept=num_kept, num_drawn=num_drawn, num_prompts=128)

    assert size(64, 64, 128) == 128
    assert size(3, 125, 250) == 6
    assert size(1, 127, 128) == 2
    assert size(120, 8, 128) == 128
    assert size(128, 0, 128) == 128


def test_it_gives_up_with_a_sentence_and_what_there_is(caplog):
    with caplog.at_level(logging.WARNING):
        sampled, world = sample([(1, 0)] + [(0, 0)] * 8, dynamic(max_refills=2), 3)
    assert world.asked == [3, 3, 3]
    assert sampled.prompts.group_ids == (0,)
    assert "gave up after 2 refills: 1 of 3 groups, from 9 drawn" in caplog.text


def test_nothing_to_learn_from_is_an_error():
    with pytest.raises(RolloutError, match="none of 4 groups in 2 rounds has both"):
        sample([(0, 0)] * 4, dynamic(max_refills=1), 2)


def test_a_reward_that_never_has_a_verdict_stops_the_run():
    with pytest.raises(RolloutError, match="no verdict on any of 4 responses"):
        sample([(None, None)] * 2, GTPOConfig(), 2)


def test_a_refill_without_a_verdict_is_dropped_like_any_other():
    sampled, world = sample([(1, 0), (0, 0), (None, None), (0, 1)], dynamic(), 2)
    assert world.asked == [2, 2]
    assert sampled.prompts.group_ids == (0, 3)


def test_batches_of_different_policies_do_not_mix():
    import dataclasses

    one = batch([1], 2)
    with pytest.raises(ShapeError, match=r"policy versions \[0, 1\]"):
        take_rows([one, dataclasses.replace(one, policy_version=1)], [(0, 0), (1, 0)])


def test_batches_of_different_policies_mix_where_responses_survive_a_push():
    import dataclasses

    old, new = batch([1, 2], 1), dataclasses.replace(batch([4], 1), policy_version=1)  # lengths 2, 3 and 2
    spans = dataclasses.replace(old, token_versions=torch.tensor([[0, 1, 0], [0, 0, 0]]))
    whole = take_rows([new, spans, old], [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1)], may_mix=True)
    assert whole.policy_version == 0
    assert whole.oldest_versions.tolist() == [1, 0, 0, 0, 0]
    assert whole.is_multi_version.tolist() == [False, True, False, False, False]
    assert whole.token_versions[whole.response_mask].tolist() == [1, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0]
    assert whole.select([1]).token_versions.tolist() == [[0, 1]]
    # of one version there is nothing to say
    assert take_rows([old, old], [(0, 0), (1, 0)], may_mix=True).token_versions is None
    assert not old.is_multi_version.any()
    with pytest.raises(ShapeError, match=r"token_versions \(1, 3\)"):
        dataclasses.replace(old, token_versions=torch.zeros(1, 3, dtype=torch.int64))
