"""Sampling ahead over stages that do nothing: how far, with which weights, and what is lost when something ends."""

import dataclasses
import threading

import pytest
import torch

from gtpo_megatron.batch import PromptBatch
from gtpo_megatron.config.algorithm import DynamicSamplingConfig, GTPOConfig, OffPolicyConfig
from gtpo_megatron.errors import EngineLostError, RolloutError
from gtpo_megatron.observability.metrics import to_scalars
from gtpo_megatron.observability.timers import StageTimers
from gtpo_megatron.orchestration.loop.pipeline import rollout_pipeline
from gtpo_megatron.orchestration.loop.training_step import training_step
from gtpo_megatron.orchestration.stages.stages import MemorySharing, Stages
from gtpo_megatron.weights.push.sync import WeightSync
from recipes import tiny_cpu
from tests.unit.orchestration.gaps import check_of
from tests.unit.orchestration.loop.test_controller import PROBLEMS, World

PATIENCE_S = 20


class Busy(World):
    """Notes when it samples, trains and is pushed to; the test decides who waits for whom."""

    def __init__(self):
        super().__init__()
        self.log = []
        self.in_flight = 0
        self.before_generate = lambda _: None
        self.during_update = lambda _: None
        self.num_generated = 0
        self.lost_at = None
        self.replaced = 0
        self.abandoned = threading.Event()

    def generate(self, prompts, sampling, *, samples_per_prompt, seed):
        self.num_generated += 1
        self.in_flight += 1
        self.log.append(f"sample {prompts.group_ids[0]} of version {self.version}")
        self.before_generate(self.num_generated)
        self.in_flight -= 1
        if self.num_generated == self.lost_at:
            raise EngineLostError("rollout engine died in rollout")
        handle = super().generate(prompts, sampling, samples_per_prompt=samples_per_prompt, seed=seed)
        return self.store(dataclasses.replace(handle.fetch(), policy_version=handle.policy_version))

    def update(self, *, step):
        self.log.append(f"update {step}")
        self.during_update(step)
        return super().update(step=step)

    def transfer(self, version, *, with_checksums):
        assert self.in_flight == 0, "a push while requests are running"
        self.log.append(f"push {version}")
        return super().transfer(version, with_checksums=with_checksums)

    def replace_lost(self):
        self.replaced += 1
        return True

    def abandon(self):
        self.abandoned.set()


def loop(world, *, num_steps=5, num_prompts=2, dynamic_sampling=None, **rollout):
    """A pipeline, and a function that makes a step."""
    config = tiny_cpu.gtpo(num_steps=num_steps)
    config = dataclasses.replace(
        config,
        algorithm=GTPOConfig(
            off_policy=OffPolicyConfig(mode="truncate"), dynamic_sampling=dynamic_sampling or DynamicSamplingConfig()
        ),
        data=dataclasses.replace(config.data, prompts_per_step=num_prompts),
        rollout=dataclasses.replace(config.rollout, group_size=2, **rollout),
    )
    stages = Stages(
        engine=world,
        grade=world.grade,
        trainer=world,
        weight_sync=WeightSync(config.weight_sync, world.transfer),
        memory_sharing=MemorySharing(None, None, is_colocated=False, timers=StageTimers()),
        timers=StageTimers(),
        open_link=lambda _: None,
    )
    drawn = iter(range(100))

    def draw(num):
        return PromptBatch(problems=tuple(PROBLEMS[:num]), group_ids=tuple(next(drawn) for _ in range(num)))

    pipeline = rollout_pipeline(draw, stages, config)
    return pipeline, lambda step: training_step(pipeline, stages, config, check_of(config), step=step)


def samples(world):
    return [line for line in world.log if line.startswith("sample")]


def groups(report):
    return list(dict.fromkeys(report.sampled.rollouts.group_ids.tolist()))


def test_with_bound_0_nothing_is_sampled_ahead():
    world = Busy()
    _, step = loop(world, max_staleness=0)
    for number in (1, 2):
        report = step(number)
        assert groups(report) == [2 * number - 2, 2 * number - 1]
        assert to_scalars(report.metrics)["rollout/staleness_count"] == 0
    assert world.log == [
        *("sample 0 of version 0", "update 1", "push 1"),
        *("sample 2 of version 1", "update 2", "push 2"),
    ]


@pytest.mark.parametrize("slow", ["sampling", "training"])
def test_the_next_steps_responses_are_sampled_while_this_one_trains(slow):
    """And never of weights more than one push old, whoever is slower; the last step leaves nothing behind."""
    world = Busy()
    sampling, training = threading.Event(), threading.Event()

    def before_generate(number):
        if number > 1:  # that of the next step is under way during the update, and either may end first
            sampling.set()
            if slow == "sampling" and number <= 5:
                assert training.wait(PATIENCE_S)

    def during_update(step):
        if step < 5:
            assert sampling.wait(PATIENCE_S), "nothing is sampled during the update"
        sampling.clear()
        training.set()

    world.before_generate, world.during_update = before_generate, during_update
    _, step = loop(world, max_staleness=1)
    staleness = []
    for number in range(1, 6):
        report = step(number)
        training.clear()
        assert groups(report) == [2 * number - 2, 2 * number - 1]
        staleness.append(to_scalars(report.metrics)["rollout/staleness_count"])
    assert staleness == [0, 1, 1, 1, 1]
    assert world.num_generated == 5
    # which weights sample what does not depend on who was faster
    assert samples(world) == [
        *(f"sample {group} of version {version}" for group, version in ((0, 0), (2, 0), (4, 1), (6, 2), (8, 3))),
    ]


def test_times_beside_the_trainer_are_counted_as_theirs():
    pipeline, step = loop(Busy(), max_staleness=1)
    step(1)
    step(2)
    seconds = pipeline._stages.timers.take()
    assert {"timing/rollout_s", "timing/reward_s", "timing/rollout_wait_s", "timing/update_s"} <= set(seconds)


def test_a_loss_is_made_up_after_the_push_with_the_same_prompts_and_fresh_weights():
    world = Busy()
    world.lost_at = 2
    _, step = loop(world, max_staleness=1)
    step(1)
    assert world.replaced == 1
    report = step(2)
    assert groups(report) == [2, 3]
    assert to_scalars(report.metrics)["rollout/staleness_count"] == 0
    assert groups(step(3)) == [4, 5]
    assert samples(world)[:4] == [
        *("sample 0 of version 0", "sample 2 of version 0"),  # the second was lost
        *("sample 2 of version 1", "sample 4 of version 1"),
    ]


def test_a_loss_in_a_refill_loses_no_prompt_if_the_second_try_needs_another_number():
    """Step 2 draws 3 to 5, and 6 and 7 for 5, whose engine dies; then 4 is of no use either, and it wants 6 to 8."""
    world = Busy()
    world.lost_at = 3

    def grade(rollouts, prompts):
        graded = World.grade(world, rollouts, prompts)
        useless = {5} if world.num_generated < 3 else {4, 5}
        keep = torch.tensor([group not in useless for group in rollouts.group_ids.tolist()])
        return dataclasses.replace(graded, rewards=graded.rewards * keep)

    world.grade = grade
    dynamic = DynamicSamplingConfig(enabled=True, max_refills=3)
    _, step = loop(world, num_prompts=3, max_staleness=1, dynamic_sampling=dynamic)
    assert [groups(step(number)) for number in (1, 2, 3)] == [[0, 1, 2], [3, 6, 7], [9, 10, 11]]
    assert world.replaced == 1


def test_an_error_beside_the_trainer_ends_the_step():
    world = Busy()

    def fail(number):
        if number == 2:
            raise RolloutError("response 0 of group 2: 0 tokens")

    world.before_generate = fail
    _, step = loop(world, max_staleness=1)
    with pytest.raises(RolloutError, match="group 2"):
        step(1)
    assert "push 1" not in world.log


def test_a_run_that_fails_does_not_wait_for_what_is_in_flight():
    world = Busy()
    world.before_generate = lambda number: number == 1 or world.abandoned.wait(PATIENCE_S)
    pipeline, _ = loop(world, max_staleness=1)
    pipeline.take(1)
    assert not world.abandoned.is_set()
    pipeline.close()
    assert world.abandoned.is_set()
    assert not any(thread.name.startswith("sampling of") for thread in threading.enumerate())


def test_what_was_sampled_ahead_survives_a_checkpoint(tmp_path):
    """A run that is broken after any step and goes on has the same responses as one that is not."""
    _, step = loop(Busy(), max_staleness=1)
    whole = [step(number) for number in range(1, 5)]

    world = Busy()
    pipeline, step = loop(world, max_staleness=1)
    step(1)
    step(2)
    with pipeline.frozen() as state_dict:
        torch.save(state_dict(), tmp_path / "rollouts.pt")
    again = Busy()
    again.version = 2
    pipeline, step = loop(again, max_staleness=1)
    pipeline.begin_at(3)
    pipeline.load_state_dict(torch.load(tmp_path / "rollouts.pt", weights_only=True), step=2)
    for _ in range(3):
        pipeline._draw(2)  # the prompt sampler's own state brings it here
    for number in (3, 4):
        report = step(number)
        assert torch.equal(
            report.sampled.rollouts.fetch().response_ids, whole[number - 1].sampled.rollouts.fetch().response_ids
        )
        assert torch.equal(report.sampled.rewards.rewards, whole[number - 1].sampled.rewards.rewards)
        assert report.sampled.prompts == whole[number - 1].sampled.prompts
        assert to_scalars(report.metrics) == to_scalars(whole[number - 1].metrics)
    assert again.log[0] == "sample 6 of version 2"
