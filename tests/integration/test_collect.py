"""Who is named when remote calls fail: real Ray actors that raise, die and hang."""

import os
import signal
import time

import pytest

from gtpo_megatron.errors import DataError, WorkerError
from gtpo_megatron.orchestration.on_ray import collect as module
from gtpo_megatron.orchestration.on_ray.collect import checked_while_waiting, collect
from tests.integration.own_ray import own_ray

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.xdist_group("workers that answer"),
    pytest.mark.filterwarnings("ignore"),
]


class Worker:
    def answer(self, value, after_s=0.0):
        time.sleep(after_s)
        return value

    def complain(self, kind, text):
        raise kind(text)

    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def workers():
    import ray

    with own_ray():
        options = ray.remote(Worker).options(num_cpus=0)
        yield {name: options.remote() for name in ("rank 0", "rank 1", "rank 2")}


def test_answers_by_name(workers):
    calls = {name: worker.answer.remote(name[-1]) for name, worker in workers.items()}
    assert collect(calls, stage="score", deadline_s=60) == {"rank 0": "0", "rank 1": "1", "rank 2": "2"}


def test_an_error_raised_on_purpose_keeps_its_type_and_names_the_process(workers):
    calls = {
        "rank 0": workers["rank 0"].complain.remote(RuntimeError, "connection closed by peer"),
        "rank 1": workers["rank 1"].complain.remote(DataError, "entropy[3] is NaN"),
    }
    with pytest.raises(DataError, match=r"rank 1, in credit: entropy\[3\] is NaN"):
        collect(calls, stage="credit", deadline_s=60)


def test_a_process_that_hangs_is_named_not_the_one_that_waited_for_it(workers):
    calls = {
        "rank 0": workers["rank 0"].complain.remote(RuntimeError, "collective timed out"),
        "rank 1": workers["rank 1"].answer.remote(1, 30.0),
    }
    with pytest.raises(WorkerError, match="rank 1 did not answer in update; rank 0 gave up waiting: .*timed out"):
        collect(calls, stage="update", deadline_s=60)


def test_the_deadline_names_who_is_late(workers):
    import ray

    calls = {"rank 0": workers["rank 0"].answer.remote(0), "rank 2": workers["rank 2"].answer.remote(2, 30.0)}
    ray.wait([calls["rank 0"]])
    with pytest.raises(WorkerError, match="^rank 2: no answer in score within 1 s"):
        collect(calls, stage="score", deadline_s=1)


def test_a_process_that_died_is_named_before_those_that_lost_it(workers, monkeypatch):
    import ray

    monkeypatch.setattr(module, "GRACE_S", 60.0)  # Ray may be slow to find out, and the test ends when it has
    fresh = ray.remote(Worker).options(num_cpus=0).remote()
    ray.get(fresh.answer.remote(1))  # the others still sleep
    calls = {
        "rank 0": workers["rank 0"].complain.remote(RuntimeError, "connection closed by peer"),
        "rank 1": fresh.die.remote(),
    }
    with pytest.raises(WorkerError, match="^rank 1 died in update"):
        collect(calls, stage="update", deadline_s=60)


def test_a_look_that_raises_ends_the_wait(workers):
    def look():
        raise WorkerError("Ray's GCS died")

    started = time.monotonic()
    with checked_while_waiting(look), pytest.raises(WorkerError, match="^Ray's GCS died$"):
        collect({"rank 0": workers["rank 0"].answer.remote(1, 60.0)}, stage="score", deadline_s=60)
    assert time.monotonic() - started < 30


def test_a_stage_that_is_quick_looks_too(workers):
    """Without Ray's raylet steps of a second went on for a quarter of a minute."""
    import ray

    def look():
        raise WorkerError("Ray's raylet died")

    answered = workers["rank 0"].answer.remote(1)
    ray.get(answered)
    with checked_while_waiting(look), pytest.raises(WorkerError, match="^Ray's raylet died$"):
        collect({"rank 0": answered}, stage="score", deadline_s=60)
