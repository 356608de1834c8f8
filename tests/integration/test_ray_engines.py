"""Several engines as one, on real Ray actors that make responses up: who answers, who dies, what is asked again."""

import dataclasses
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch

from gtpo_megatron.batch import Problem, PromptBatch, RolloutBatch
from gtpo_megatron.config.rollout import RolloutConfig, SamplingConfig
from gtpo_megatron.errors import EngineLostError, RolloutError, WorkerError
from gtpo_megatron.orchestration.on_ray.collect import collect
from gtpo_megatron.orchestration.on_ray.engines import RayEngines
from gtpo_megatron.orchestration.on_ray.fleet import EngineFleet
from gtpo_megatron.orchestration.stages.engines import Attempt
from gtpo_megatron.orchestration.stages.rollouts import handles_then_chunks, joined
from tests.integration.own_ray import own_ray

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.xdist_group("engines that are made up"),
    pytest.mark.filterwarnings("ignore"),
]

DEADLINE_S = 600.0
"""A process of Ray's takes minutes to start on a machine that is busy with others."""

SAMPLING = SamplingConfig(max_response_tokens=8)
PROMPTS = PromptBatch(
    problems=tuple(Problem(problem_id=str(i), prompt_ids=(1,) * (1 + i), answer="") for i in range(4)),
    group_ids=(10, 11, 12, 13),
)


class Engine:
    """Response tokens spell the request; an engine that finds its call's name in the folder takes it away and dies."""

    def __init__(self, index, notes):
        self.index = index
        self.notes = notes
        self.version = -1
        self.begun = {}

    def become(self, index, notes):
        """Another engine, as if new: a process takes seconds to start."""
        self.__init__(index, notes)

    def _maybe_die(self, call):
        note = self.notes / f"{self.index} {call}"
        if note.exists():
            note.unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    def run(self, function):
        return function(self)

    def sample(self, function):
        yield from handles_then_chunks(function(self))

    def generate(self, requests, sampling, seed):
        self._maybe_die("generate")
        return self._batch(requests, seed)

    def abort(self, ticket):
        del self.begun[ticket]

    def begin(self, requests, sampling, seed, priority, ticket):
        assert priority == ticket.group
        self.begun[ticket] = self.version, requests, seed
        (self.notes / f"{self.index} has begun").touch()

    def advance(self, limit_s):
        self._maybe_die("slice")
        time.sleep(0.01)
        return [] if (self.notes / "hold").exists() else list(self.begun)

    def take(self, ticket):
        return self._grown(*self.begun.pop(ticket))

    def _grown(self, version, requests, seed):
        """The first token is of the weights when it was begun."""
        batch = self._batch(requests, seed)
        if version != self.version:
            versions = torch.full_like(batch.response_ids, self.version)
            versions[:, 0] = version
            batch = dataclasses.replace(batch, policy_version=version, token_versions=versions)
        return batch

    def _batch(self, requests, seed):
        tokens = torch.tensor([[r.group_id, r.sample, r.seed(seed) % 1000] for r in requests])
        return RolloutBatch(
            prompt_ids=torch.zeros(len(requests), 1, dtype=torch.int64),
            prompt_lengths=torch.tensor([len(r.prompt_ids) for r in requests]),
            response_ids=tokens,
            response_lengths=torch.full((len(requests),), 3),
            loss_mask=torch.ones(tokens.shape, dtype=torch.bool),
            rollout_logprobs=torch.full(tokens.shape, -0.1 * self.index),
            group_ids=tokens[:, 0],
            truncated=torch.zeros(len(requests), dtype=torch.bool),
            policy_version=self.version,
        )

    def identity(self):
        self._maybe_die("identity")
        return "host", self.index

    @property
    def weights(self):
        return self

    def connect(self, link, workers):
        self._maybe_die("connect")
        (self.notes / f"{self.index} connected").write_text(str(link))

    def receive(self, version, with_checksums):
        self.version = version
        return {self.index: {"version": version}}


class Processes:
    """Engines for one test after the other: those that are still alive at a test's end serve the next one."""

    def __init__(self):
        self._idle, self._used = [], []

    def remote(self, index, notes):
        import ray

        if self._idle:
            engine = self._idle.pop()
            ray.get(engine.become.remote(index, notes))
        else:
            engine = ray.remote(Engine).options(num_cpus=0).remote(index, notes)
        self._used.append(engine)
        return engine

    def take_back(self):
        import ray

        for engine in self._used:
            with suppress(ray.exceptions.RayActorError):
                ray.get(engine.become.remote(None, None))
                self._idle.append(engine)
        self._used.clear()


@pytest.fixture(scope="module")
def processes():
    with own_ray():
        yield Processes()


@pytest.fixture(autouse=True)
def _live_processes_serve_the_next_test(processes, monkeypatch):
    monkeypatch.setattr(World, "processes", processes, raising=False)
    yield
    processes.take_back()


class World:
    """A fleet, the weights it was given, and what happened to it."""

    def __init__(self, tmp_path, num_engines, max_restarts=1):
        self._notes = tmp_path
        self.restarted, self.pushed = [], []
        self.fleet = EngineFleet(
            [self.processes.remote(index, self._notes) for index in range(num_engines)],
            hosts=["here"] * num_engines,
            rollout=RolloutConfig(max_engine_restarts=max_restarts),
            restart=self.restart,
            deadline_s=DEADLINE_S,
            open_link=self.open_link,
        )
        self.engines = RayEngines(self.fleet, push_again=self.push_again)
        self.links = 0
        self.push(5)

    def restart(self, index):
        self.restarted.append(index)
        return self.processes.remote(index, self._notes)

    def open_link(self):
        self.links += 1
        self.engines.unattended().connect_weights(self.links)
        self.pushed.append("reconnected")

    def push(self, version):
        self.fleet.replace_dead()
        receiving = self.fleet.receiving(version, with_checksums=True)
        received = collect(receiving, stage="weight_sync", deadline_s=DEADLINE_S)
        self.fleet.mark_received()
        return received

    def push_again(self, version):
        self.pushed.append(version)
        self.push(version)

    def die_at(self, *calls):
        for call in calls:
            (self._notes / call).touch()

    def group_sampler(self):
        return self.engines.group_sampler(SAMPLING, samples_per_prompt=3, seed=1)

    def wait_until(self, condition):
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def generate(self):
        return self.engines.generate(PROMPTS, SAMPLING, samples_per_prompt=3, seed=1)


def test_rows_come_back_in_the_order_of_the_prompts_and_groups_are_split(tmp_path):
    handle = World(tmp_path, 3).generate()
    batch = handle.fetch()
    assert [tuple(row[:2].tolist()) for row in batch.response_ids] == [
        (g, s) for g in PROMPTS.group_ids for s in range(3)
    ]
    assert handle.group_ids.tolist() == batch.group_ids.tolist()
    assert handle.prompt_lengths.tolist() == batch.prompt_lengths.tolist() == [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3
    by_engine = batch.rollout_logprobs[:, 0].mul(-10).round().int().reshape(4, 3)
    assert all(len(set(group.tolist())) == 3 for group in by_engine)
    assert handle.policy_version == 5
    # the tokens are those of one engine alone
    alone = World(tmp_path, 1).generate().fetch()
    assert torch.equal(alone.response_ids, batch.response_ids)


def test_chosen_rows_of_several_batches(tmp_path):
    world = World(tmp_path, 2)
    first, second = world.generate(), world.generate()
    chosen = joined([first.select([2, 0]), second.select([11])])
    batch = chosen.fetch()
    assert batch.response_ids[:, :2].tolist() == [[10, 2], [10, 0], [13, 2]]
    assert chosen.group_ids.tolist() == [10, 10, 13]
    again = chosen.select([1])
    assert again.fetch().response_ids[:, :2].tolist() == [[10, 0]]
    world.push(6)
    with pytest.raises(RolloutError, match=r"policy versions \[5, 6\]"):
        joined([first.select([0]), world.generate().select([0])])


def test_an_engine_that_dies_is_replaced_and_asked_again(tmp_path):
    world = World(tmp_path, 2)
    expected = world.generate().fetch()
    world.die_at("1 generate")
    handle = world.generate()
    assert torch.equal(handle.fetch().response_ids, expected.response_ids)
    assert torch.equal(handle.fetch().rollout_logprobs, expected.rollout_logprobs)  # the same engine's share
    assert (world.restarted, world.pushed, world.engines.num_restarts) == ([1], ["reconnected", 5], 1)
    assert handle.policy_version == 5
    # the next death is one too many
    world.die_at("0 generate")
    with pytest.raises(
        WorkerError, match=r"rollout engine 0 died in rollout, after 1 restarts .*max_engine_restarts=1"
    ):
        world.generate()


def test_an_engine_that_is_dead_before_a_push_is_replaced_first(tmp_path):
    world = World(tmp_path, 2)
    world.die_at("0 identity")
    received = world.push(6)
    assert (world.restarted, world.pushed) == ([0], ["reconnected"])
    assert received == {"rollout engine 0": {0: {"version": 6}}, "rollout engine 1": {1: {"version": 6}}}


def test_an_engine_that_dies_while_the_link_is_opened_is_replaced_and_the_link_opened_anew(tmp_path):
    world = World(tmp_path, 2, max_restarts=2)
    world.die_at("0 identity", "1 connect")
    received = world.push(6)
    assert (world.restarted, world.pushed, world.links) == ([0, 1], ["reconnected"], 2)
    assert [(tmp_path / f"{index} connected").read_text() for index in range(2)] == ["2", "2"]
    assert received == {"rollout engine 0": {0: {"version": 6}}, "rollout engine 1": {1: {"version": 6}}}
    world.die_at("0 identity", "0 connect")
    with pytest.raises(WorkerError, match="rollout engine 0 died in weight_sync, after 2 restarts"):
        world.push(7)


def test_who_samples_unattended_does_not_reach_a_replacement_before_its_weights(tmp_path):
    world = World(tmp_path, 2)
    world.die_at("1 identity")
    world.fleet.replace_dead()  # a push begins
    with pytest.raises(EngineLostError, match="rollout engine 1 died, and the successor has no weights yet"):
        world.engines.unattended().generate(PROMPTS, SAMPLING, samples_per_prompt=3, seed=1)
    assert not world.engines.replace_lost()
    world.push(6)
    assert world.engines.unattended().generate(PROMPTS, SAMPLING, samples_per_prompt=3, seed=1).policy_version == 6
    assert world.restarted == [1]


def test_unattended_engines_say_that_they_are_lost_and_are_replaced_later(tmp_path):
    world = World(tmp_path, 2)
    world.die_at("1 generate")
    with pytest.raises(EngineLostError, match="rollout engine 1 died in rollout"):
        world.engines.unattended().generate(PROMPTS, SAMPLING, samples_per_prompt=3, seed=1)
    assert world.restarted == []
    world.engines.replace_lost()
    assert (world.restarted, world.pushed) == ([1], ["reconnected"])
    world.push(6)
    assert world.generate().policy_version == 6
    world.engines.replace_lost()
    assert world.restarted == [1]


def test_responses_survive_a_trip_through_a_checkpoint(tmp_path):
    world = World(tmp_path, 2)
    handle = world.generate()
    stored = world.engines.store(handle.fetch())
    assert torch.equal(stored.fetch().response_ids, handle.fetch().response_ids)
    assert torch.equal(stored.response_lengths, handle.response_lengths)


def begin_all(world, sampler):
    """Two groups on each of two engines; returns the tries by engine."""
    tries = {engine: [Attempt(PROMPTS.group_ids[2 * engine + i], 0) for i in range(2)] for engine in range(2)}
    for engine, attempts in tries.items():
        problems = PROMPTS.problems[2 * engine : 2 * engine + 2]
        sampler.begin_slice(engine, dict(zip(attempts, problems, strict=True)), [])
    return tries


def until_whole(sampler, num, *, abort=()):
    """Slice after slice until so many groups have come; returns them, and the engines that were lost."""
    groups, lost = {}, []
    while len(groups) < num:
        for end in sampler.ended_slices():
            groups |= end.groups
            if end.is_lost:
                lost.append(end.engine)
                num -= 2
            else:
                sampler.begin_slice(end.engine, {}, list(abort) if end.engine == 0 else [])
                abort = () if end.engine == 0 else abort
    return groups, lost


def test_a_push_gets_in_between_two_slices(tmp_path):
    world = World(tmp_path, 2)
    expected = world.generate().fetch()
    (tmp_path / "hold").touch()
    sampler = world.group_sampler()
    tries = begin_all(world, sampler)
    world.wait_until(lambda: all((tmp_path / f"{index} has begun").exists() for index in range(2)))
    world.push(6)
    (tmp_path / "hold").unlink()
    found, lost = until_whole(sampler, 4)
    assert sorted(found) == sorted([*tries[0], *tries[1]])
    assert lost == []
    assert all(handle.policy_version == 5 and handle.is_multi_version.all() for handle in found.values())
    handle = joined([found[attempt] for attempt in sorted(found)])
    batch = handle.fetch()
    assert torch.equal(batch.response_ids, expected.response_ids)
    assert set(map(tuple, batch.token_versions.tolist())) == {(5, 6, 6)}
    # the next batch has one version again, and both may be one
    fresh = world.generate()
    assert (fresh.policy_version, fresh.fetch().token_versions) == (6, None)
    both = joined([fresh.select([0]), handle.select([1])], max_spread=1)
    assert (both.policy_version, both.is_multi_version.tolist()) == (5, [False, True])
    assert both.fetch().token_versions.tolist() == [[6, 6, 6], [5, 6, 6]]


def test_an_aborted_group_does_not_come(tmp_path):
    world = World(tmp_path, 2)
    (tmp_path / "hold").touch()
    sampler = world.group_sampler()
    tries = begin_all(world, sampler)
    world.wait_until(lambda: all((tmp_path / f"{index} has begun").exists() for index in range(2)))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: (time.sleep(0.5), (tmp_path / "hold").unlink()))
        found, _ = until_whole(sampler, 3, abort=[tries[0][1]])
    assert sorted(found) == sorted([tries[0][0], *tries[1]])


def test_an_engine_that_dies_between_slices_is_replaced_once(tmp_path):
    """By the push, which finds it dead; what its death is reported for later is the old process."""
    world = World(tmp_path, 2)
    (tmp_path / "hold").touch()
    sampler = world.group_sampler()
    begin_all(world, sampler)
    world.die_at("1 slice")
    while (tmp_path / "1 slice").exists():
        for end in sampler.ended_slices():
            sampler.begin_slice(end.engine, {}, [])
    world.push(6)
    (tmp_path / "hold").unlink()
    found, lost = until_whole(sampler, 4)
    assert lost == [1]
    assert len(found) == 2
    assert not world.engines.replace_lost()
    assert (world.restarted, world.pushed) == ([1], ["reconnected"])
    assert world.generate().policy_version == 6


def test_a_replacement_without_weights_is_not_asked(tmp_path):
    world = World(tmp_path, 2)
    sampler = world.group_sampler()
    world.die_at("1 identity")
    world.fleet.replace_dead()  # a push begins
    sampler.begin_slice(1, {Attempt(10, 0): PROMPTS.problems[0]}, [])
    (end,) = sampler.ended_slices()
    assert (end.engine, end.is_lost) == (1, True)


def test_two_at_once_need_two_restarts(tmp_path):
    world = World(tmp_path, 3, max_restarts=2)
    world.die_at("0 generate", "2 generate")
    assert world.generate().policy_version == 5
    assert (world.restarted, world.pushed) == ([0, 2], ["reconnected", 5])
    world = World(tmp_path, 3)
    world.die_at("0 generate", "2 generate")
    with pytest.raises(WorkerError, match="rollout engine 0, rollout engine 2 died in rollout, after 0 restarts"):
        world.generate()
