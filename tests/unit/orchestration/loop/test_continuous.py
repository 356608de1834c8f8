"""Sampling group by group over engines that do nothing: who waits for whom, what is counted, what is not lost."""

import dataclasses
import random
import threading
import time
from collections import Counter

import pytest
import torch

from gtpo_megatron.config.algorithm import DynamicSamplingConfig
from gtpo_megatron.errors import RolloutError
from gtpo_megatron.observability.metrics import to_scalars
from gtpo_megatron.orchestration.stages.engines import SliceEnd
from gtpo_megatron.orchestration.stages.rollouts import RolloutHandle
from gtpo_megatron.run_folder.folder import RunFolder
from gtpo_megatron.run_folder.metrics_file import read_metrics
from tests.unit.orchestration.loop.test_controller import World, run
from tests.unit.orchestration.loop.test_sampling import batch
from tests.unit.orchestration.loop.test_stepwise import PATIENCE_S, groups, loop


class Sliced(World):
    """Engines whose groups end when the test says so; tokens have the version of the slice that made them."""

    def __init__(self, num_engines=1):
        super().__init__()
        self.log = []
        self.changed = threading.Condition()
        self.inside = {engine: {} for engine in range(num_engines)}
        self.slices = {}
        self.is_whole = lambda _attempt, _slices: True
        self.dead = set()
        self.may_be_pushed_to = lambda: True
        self.is_abandoned = False
        self.slice_error = None

    def note(self, line):
        with self.changed:
            self.log.append(line)
            self.changed.notify_all()

    def wait_for(self, line):
        with self.changed:
            assert self.changed.wait_for(lambda: line in self.log, PATIENCE_S), f"no {line!r} in {self.log}"

    def group_sampler(self, sampling, *, samples_per_prompt, seed):
        self.samples_per_prompt = samples_per_prompt
        return self

    def begin_slice(self, engine, begin, abort):
        assert engine not in self.slices
        with self.changed:
            for attempt in abort:
                del self.inside[engine][attempt]
                self.log.append(f"abort {attempt.group}")
            for attempt in begin:
                self.inside[engine][attempt] = [self.version, 0]
                self.log.append(f"begin {attempt.group} of version {self.version}")
            self.changed.notify_all()
        self.slices[engine] = None

    def ended_slices(self):
        time.sleep(0.001)
        if self.slice_error:
            raise self.slice_error
        ends = []
        for engine in list(self.slices):
            del self.slices[engine]
            if engine in self.dead:
                self.inside[engine] = {}
                ends.append(SliceEnd(engine=engine, groups={}, is_lost=True))
                continue
            whole = {}
            for attempt, made in list(self.inside[engine].items()):
                made[1] += 1
                if self.is_whole(attempt, made[1]):
                    del self.inside[engine][attempt]
                    whole[attempt] = self.handle(attempt.group, made[0])
            ends.append(SliceEnd(engine=engine, groups=whole))
        return ends

    def handle(self, group, begun):
        rollouts = batch([group], self.samples_per_prompt)
        versions = torch.full_like(rollouts.response_ids, self.version)
        versions[:, 0] = begun
        rollouts = dataclasses.replace(
            rollouts, policy_version=begun, token_versions=versions if begun != self.version else None
        )
        return RolloutHandle.of(rollouts)

    def in_flight(self):
        return [attempt.group for attempts in self.inside.values() for attempt in attempts]

    def transfer(self, version, *, with_checksums):
        assert self.may_be_pushed_to(), f"a push with {self.in_flight()} in flight"
        self.dead.clear()
        super().transfer(version, with_checksums=with_checksums)
        self.note(f"push {version}")
        return {}, {}

    def replace_lost(self):
        found = bool(self.dead)
        self.dead.clear()
        return found

    def abandon(self):
        self.is_abandoned = True


def begun(world):
    return [line for line in world.log if line.startswith("begin")]


def test_engines_sample_ahead_as_far_as_the_bound_allows_and_steps_take_the_oldest():
    world = Sliced()
    pipeline, step = loop(world, max_staleness=2, partial=True, num_steps=6)
    update = world.update

    def update_after_sampling(*, step):
        if step == 1:
            world.wait_for("begin 5 of version 0")
        return update(step=step)

    world.update = update_after_sampling
    reports = [step(number) for number in range(1, 7)]
    assert [groups(report) for report in reports] == [[2 * k, 2 * k + 1] for k in range(6)]
    staleness = [to_scalars(report.metrics)["rollout/staleness_mean"] for report in reports]
    assert staleness[:3] == [0, 1, 2], "groups wait for their turn"
    assert max(staleness) == 2
    assert begun(world)[:6] == [f"begin {group} of version 0" for group in range(6)]
    account = to_scalars(reports[-1].metrics)
    assert account["prompts/drawn_count"] == account["prompts/trained_count"] == 12
    assert account["prompts/under_way_count"] == 0
    pipeline.close()
    assert not world.is_abandoned


def test_a_push_does_not_wait_and_what_is_in_flight_goes_on_with_the_new_weights():
    world = Sliced()
    world.is_whole = lambda attempt, _slices: attempt.group < 2 or world.version > (attempt.group - 2) // 2
    pipeline, step = loop(world, max_staleness=1, partial=True)
    first, second = step(1), step(2)
    assert to_scalars(first.metrics)["rollout/multi_version_count"] == 0
    rollouts = second.sampled.rollouts
    assert groups(second) == [2, 3]
    assert rollouts.policy_version == 0
    assert torch.equal(rollouts.is_multi_version, rollouts.response_lengths > 1)
    scalars = to_scalars(second.metrics)
    assert scalars["rollout/staleness_count"] == 1
    assert "sync/logprob_gap_max" not in scalars
    pipeline.close()


def test_without_partial_a_push_waits_until_nothing_is_in_flight():
    world = Sliced(2)
    world.is_whole = lambda attempt, slices: slices > attempt.group % 7
    world.may_be_pushed_to = lambda: not world.in_flight()
    pipeline, step = loop(world, max_staleness=3, num_engines=2, num_steps=8)
    versions = []
    for number in range(1, 9):
        rollouts = step(number).sampled.rollouts
        assert not rollouts.is_multi_version.any()
        versions.append(number - 1 - rollouts.policy_version)
    assert max(versions) <= 3
    pipeline.close()


def test_the_step_begins_without_the_slowest_whose_prompts_come_first_next():
    world = Sliced()
    world.is_whole = lambda attempt, _slices: attempt.group != 1 or attempt.number > 0
    world.may_be_pushed_to = lambda: not world.in_flight()
    pipeline, step = loop(world, over_sample=1.5, stragglers="abort", num_steps=3)
    first = step(1)
    assert groups(first) == [0, 2]
    assert to_scalars(first.metrics)["rollout/groups_aborted_count"] == 1
    assert world.log[-2:] == ["abort 1", "push 1"]
    second = step(2)
    assert groups(second) == [1, 3]
    assert to_scalars(second.metrics)["rollout/staleness_count"] == 0
    assert begun(world)[3] == "begin 1 of version 1"
    third = to_scalars(step(3).metrics)
    assert third["prompts/drawn_count"] == third["prompts/trained_count"] + third["prompts/under_way_count"]
    pipeline.close()


def test_a_group_that_is_too_old_before_its_grader_is_free_is_not_graded():
    """While group 4 is graded, for two steps, group 5 of version 0 waits with others of versions 1 and 2."""
    world, is_free = Sliced(), threading.Event()
    graded = []

    def grade(rollouts, prompts):
        graded.append(prompts.group_ids)
        if len(graded) == 2:
            assert is_free.wait(PATIENCE_S)
        return World.grade(world, rollouts, prompts)

    world.grade = grade
    world.is_whole = lambda attempt, _slices: len(graded) >= {4: 1, 5: 2}.get(attempt.group, 0) or attempt.number > 0
    pipeline, step = loop(world, max_staleness=1, over_sample=3.0, stragglers="abort")
    early = [step(1), step(2)]
    assert graded == [(0, 1, 2, 3), (4,)]
    assert to_scalars(early[1].metrics)["rollout/groups_too_old_count"] == 2
    end = time.monotonic() + PATIENCE_S
    while not any(handle.policy_version == 2 for handle in dict(pipeline._ungraded).values()):
        assert time.monotonic() < end
        time.sleep(0.01)
    is_free.set()
    reports = [*early, step(3), step(4), step(5)]
    trained = [group for report in reports for group in groups(report)]
    assert sorted(trained) == sorted(set(trained))
    assert {4, 5} < set(trained)
    pipeline.close()


@pytest.mark.parametrize("partial", [False, True])
def test_a_dead_engine_is_replaced_while_the_step_waits_and_loses_no_prompt(partial):
    world = Sliced(2)
    world.dead.add(1)
    world.is_whole = lambda _attempt, slices: slices > 50
    pipeline, step = loop(world, max_staleness=1, partial=partial, num_engines=2, over_sample=2.0, num_steps=3)
    reports = [step(number) for number in (1, 2, 3)]
    assert "push 0" in world.log, "the successor needs the weights that the others have"
    assert sorted(group for report in reports for group in groups(report)) == list(range(6))
    assert sum(to_scalars(report.metrics)["rollout/groups_lost_count"] for report in reports) >= 1
    pipeline.close()


def test_an_error_of_either_thread_ends_the_step():
    world = Sliced()
    world.slice_error = RolloutError("response 0 of group 0: 0 tokens")
    pipeline, step = loop(world, max_staleness=2, partial=True)
    with pytest.raises(RolloutError, match="group 0"):
        step(1)
    pipeline.close()

    world = Sliced()
    world.grade = lambda _rollouts, _prompts: 1 / 0
    pipeline, step = loop(world, max_staleness=2, partial=True)
    with pytest.raises(ZeroDivisionError):
        step(1)
    pipeline.close()
    assert not any(thread.name.endswith("of groups") for thread in threading.enumerate())


def test_a_run_that_ends_early_ends_what_is_in_flight():
    world = Sliced()
    world.is_whole = lambda attempt, _slices: attempt.group < 2
    pipeline, _ = loop(world, max_staleness=2, partial=True)
    pipeline.take(1)
    pipeline.close()
    assert world.is_abandoned
    assert not any(thread.name.endswith("of groups") for thread in threading.enumerate())


def test_dynamic_sampling_replaces_groups_one_by_one_and_gives_up():
    world = Sliced()
    world.grade = lambda rollouts, _prompts: rewards(rollouts, is_mixed=lambda group: group % 3 == 0)
    dynamic = DynamicSamplingConfig(enabled=True, max_refills=3)
    pipeline, step = loop(world, max_staleness=1, partial=True, dynamic_sampling=dynamic, num_steps=3)
    report = step(1)
    assert groups(report) == [0, 3]
    assert to_scalars(report.metrics)["rollout/groups_dropped_count"] >= 2
    pipeline.close()

    world = Sliced()
    world.grade = lambda rollouts, _prompts: rewards(rollouts, is_mixed=lambda _: False)
    pipeline, step = loop(world, max_staleness=1, partial=True, dynamic_sampling=dynamic)
    with pytest.raises(RolloutError, match=r"none of \d+ groups has both correct and wrong"):
        step(1)
    pipeline.close()


def test_a_step_that_has_enough_in_spite_of_many_drops_still_waits_for_what_would_be_too_old():
    """Groups 2 and 3 are long and of version 0, for step 2 at the latest; six others are dropped meanwhile."""
    world = Sliced()
    world.grade = lambda rollouts, _prompts: rewards(rollouts, is_mixed=lambda group: group < 4 or group > 9)
    world.is_whole = lambda attempt, slices: attempt.group not in (2, 3) or slices > 300
    dynamic = DynamicSamplingConfig(enabled=True, max_refills=1)
    pipeline, step = loop(world, max_staleness=1, partial=True, dynamic_sampling=dynamic, num_steps=3)
    step(1)
    assert groups(step(2)) == [2, 3]
    assert not [line for line in world.log if line.startswith("abort")]
    pipeline.close()


def rewards(rollouts, *, is_mixed):
    values = World().grade(rollouts, None)
    keep = torch.tensor([is_mixed(group) for group in rollouts.group_ids.tolist()])
    return dataclasses.replace(values, rewards=values.rewards * keep)


class Guarded(Sliced):
    """Nobody measures, checks or saves while responses are written."""

    def __init__(self):
        super().__init__()
        self.num_guarded = 0
        self.is_whole = lambda attempt, slices: slices > 3 * (attempt.group % 5)

    def generate(self, prompts, sampling, *, samples_per_prompt, seed):
        self.num_guarded += 1
        assert not self.in_flight()
        return super().generate(prompts, sampling, samples_per_prompt=samples_per_prompt, seed=seed)


@pytest.mark.parametrize("rollout", [{"max_staleness": 3, "partial": True}, {"max_staleness": 2, "over_sample": 2.0}])
def test_who_else_needs_the_engines_waits_until_nothing_is_in_flight(tmp_path, rollout):
    world = Guarded()
    run(RunFolder(tmp_path), world, rollout=rollout)
    assert world.num_guarded == 2 + 2 + 1  # two sets measured before and after, the last push's check
    rows = read_metrics(tmp_path / "metrics.jsonl")[1:]
    assert all(row["rollout/staleness_count"] <= 3 for row in rows)
    assert rows[-1]["prompts/trained_count"] == 8


@pytest.mark.parametrize("seed", range(6))
def test_a_run_that_is_killed_and_resumed_trains_every_prompt_once(tmp_path, seed):
    """Groups end in random order, engines die, the driver is killed behind a checkpoint."""
    chance = random.Random(seed)
    rollout = {
        **{"max_staleness": chance.choice([1, 2, 4]), "partial": True, "num_engines": 2},
        "stragglers": chance.choice(["wait", "abort"]),
    }
    trained = Counter()

    class Random(Sliced):
        def __init__(self):
            super().__init__(2)
            self.is_whole = lambda _attempt, _slices: chance.random() < 0.2

        def score_tokens(self, rollouts, **updates):
            if threading.current_thread() is threading.main_thread():
                self.batch = set(rollouts.group_ids.tolist())
            return super().score_tokens(rollouts, **updates)

        def update(self, *, step):
            self.trained_at[step] = self.batch
            if chance.random() < 0.3:
                self.dead.add(chance.randrange(2))
            time.sleep(0.02)
            return super().update(step=step)

    folder, world = RunFolder(tmp_path), Random()
    world.trained_at = {}

    def kill_at_the_third_step(step=None):
        if world.version == 3:
            raise KeyboardInterrupt
        return ""

    with pytest.raises(KeyboardInterrupt):
        run(folder, world, rollout=rollout, stop_reason=kill_at_the_third_step)
    again = Random()
    again.trained_at = {step: found for step, found in world.trained_at.items() if step <= 2}
    again.version = 2
    run(folder, again, folder.checkpoints.latest(), rollout=rollout)
    for found in again.trained_at.values():
        trained.update(found)
    assert sorted(again.trained_at) == [1, 2, 3, 4]
    assert set(trained.values()) == {1}
    assert len(trained) == 8
    last = read_metrics(tmp_path / "metrics.jsonl")[-1]
    assert last["prompts/trained_count"] == 8
    assert last["prompts/drawn_count"] == 8 + last["prompts/dropped_count"] + last["prompts/under_way_count"]
