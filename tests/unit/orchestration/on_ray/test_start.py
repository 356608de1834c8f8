"""In which order processes come up, and what is told of it; remote calls answer at once here."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from gtpo_megatron.errors import WorkerError
from gtpo_megatron.orchestration.on_ray import collect as ray_collect
from gtpo_megatron.orchestration.on_ray import start as ray_start
from gtpo_megatron.orchestration.on_ray.collect import Deadline
from gtpo_megatron.orchestration.on_ray.start import bring_up, counted
from recipes import tiny_cpu


class Process:
    """Writes down what it is asked."""

    def __init__(self, name, calls):
        self._name, self._calls = name, calls

    def __getattr__(self, method):
        return Remote(lambda: self._calls.append((self._name, method)))

    @property
    def run(self):
        """What the function does with the object of the process."""
        return SimpleNamespace(remote=lambda function: function(Process(self._name, self._calls)))


class Remote:
    def __init__(self, write):
        self._write = write

    def remote(self, *_, **__):
        self._write()
        return "host", 1

    __call__ = remote


@pytest.fixture
def calls(monkeypatch):
    monkeypatch.setattr(ray_start, "collect", lambda answers, **_: dict(answers))
    return []


def come_up(calls, **rollout):
    config = tiny_cpu.gtpo()
    config = replace(config, rollout=replace(config.rollout, **rollout))
    engines = ["rollout engine"] if config.rollout.num_engines == 1 else ["rollout engine 0", "rollout engine 1"]
    processes = {name: Process(name, calls) for name in ("rank 0", "rank 1", *engines, "reward")}
    ranks = [processes["rank 0"], processes["rank 1"]]
    places = bring_up(config, processes, ranks, deadline=Deadline(60.0), met=lambda *_: None)
    assert len(places) == 2
    return [call for call in calls if call[1] not in ("identity", "rendezvous")]


def test_all_load_at_once_on_gpus_of_their_own(calls):
    assert come_up(calls) == [(name, "start") for name in ("rank 0", "rank 1", "rollout engine", "reward")]


def test_engines_on_the_ranks_gpus_load_first_and_sleep_while_the_ranks_do(calls):
    engines = ("rollout engine 0", "rollout engine 1")
    assert come_up(calls, placement="colocated", num_engines=2) == [
        *((name, "start") for name in engines),
        *((name, "sleep") for name in engines),
        *((name, "start") for name in ("rank 0", "rank 1", "reward")),
    ]


@pytest.mark.parametrize("placement", ["disaggregated", "colocated"])
def test_one_deadline_is_that_of_all_phases(monkeypatch, placement):
    """Each phase takes 40 s of 100; none is given what an earlier one has used up."""
    clock, waits = [1000.0], []

    def wait(calls, *, deadline_s, grace_s):
        waits.append(deadline_s)
        clock[0] += 40.0
        late = [] if deadline_s >= 40.0 else sorted(calls)
        return dict(calls), {}, late

    monkeypatch.setattr(ray_collect, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(ray_collect, "_wait", wait)
    config = tiny_cpu.gtpo()
    config = replace(config, rollout=replace(config.rollout, placement=placement))
    processes = {name: Process(name, []) for name in ("rank 0", "rank 1", "rollout engine", "reward")}
    ranks = [processes["rank 0"], processes["rank 1"]]
    with pytest.raises(WorkerError, match="no answer in start within 100 s"):
        bring_up(config, processes, ranks, deadline=Deadline(100.0), met=lambda *_: None)
    assert waits == [100.0, 60.0, 20.0]


def test_each_answer_is_counted_with_its_kind():
    told, names = [], ["rank 0", "rank 1", "rollout engine", "reward process"]
    answered = counted("loading", names, lambda *words: told.append(words))
    for name in ("rank 1", "reward process", "rank 0", "rollout engine"):
        answered(name)
    assert {doing for doing, _ in told} == {"loading"}
    assert [how_far for _, how_far in told] == [
        "ranks 0 of 2 · engines 0 of 1 · graders 0 of 1",
        "ranks 1 of 2 · engines 0 of 1 · graders 0 of 1",
        "ranks 1 of 2 · engines 0 of 1 · graders 1 of 1",
        "ranks 2 of 2 · engines 0 of 1 · graders 1 of 1",
        "ranks 2 of 2 · engines 1 of 1 · graders 1 of 1",
    ]
    assert counted("loading", names, None) is None
