"""A job whose processes are all stopped and continued, as ``scontrol suspend`` does, loses none of its limits."""

import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from gtpo_megatron.supervision.process_tree import descendants, send
from gtpo_megatron.supervision.running_time import MOST_S, RunningTime, running_time

LIMIT_S = 1.5
STOP_S = 2.5
HERE = "tests.unit.supervision.test_running_time"


def push(path):
    from gtpo_megatron.weights.push.transports.channel import wait_until

    print("waits", flush=True)
    wait_until(path.exists, deadline_s=LIMIT_S, complaint=lambda: "no bucket")


def stage(path):
    """Ray's part is played here: a call is a path, and is over once the path exists."""

    def wait(calls, *, num_returns, timeout):
        end = time.monotonic() + timeout
        while not (ready := [call for call in calls if call.exists()]) and time.monotonic() < end:
            time.sleep(0.01)
        return ready, [call for call in calls if call not in ready]

    errors = types.SimpleNamespace(RayError=RuntimeError)
    sys.modules["ray"] = types.SimpleNamespace(wait=wait, get=lambda call: call, exceptions=errors)
    from gtpo_megatron.orchestration.on_ray.collect import collect

    print("waits", flush=True)
    collect({"rank 0": path}, stage="update", deadline_s=LIMIT_S)


def row(path, function="tests.unit.rewards.reward_functions:obey"):
    from gtpo_megatron.rewards.processes.pool import RewardPool
    from gtpo_megatron.rewards.request import RewardRequest

    with RewardPool(function, num_workers=1, timeout_s=LIMIT_S) as pool:
        pool.grade([RewardRequest(response="wait-for /")])
        print("waits", flush=True)
        [verdict] = pool.grade([RewardRequest(response=f"wait-for {path}")])
        assert verdict.failure is None, verdict


def async_row(path):
    row(path, f"{HERE}:waiting")


async def waiting(request):
    import asyncio

    while not Path(request.response.removeprefix("wait-for ")).exists():
        await asyncio.sleep(0.01)
    return 1.0


def episode(path):
    from gtpo_megatron.conversations.environment_processes import EnvironmentPool
    from gtpo_megatron.conversations.messages import Message

    name = "tests.unit.conversations.environments:Obedient"
    with EnvironmentPool(name, num_workers=1, timeout_s=LIMIT_S, memory_limit_mib=4096) as pool:
        pool.open(1, {"prompt": "fine"})
        assert pool.poll(30.0)
        print("waits", flush=True)
        pool.step(1, Message(role="assistant", content=f"wait-for {path}"))
        [event] = pool.poll(30.0)
        assert not event.failure, event


@pytest.mark.parametrize("wait", [push, stage, row, async_row, episode], ids=lambda wait: wait.__name__)
def test_a_stop_of_all_processes_uses_up_no_limit(wait, started, tmp_path):
    path = tmp_path / "done"
    code = f"import sys; from pathlib import Path; from {HERE} import {wait.__name__} as wait; wait(Path(sys.argv[1]))"
    child = started(sys.executable, "-c", code, str(path), stdout=subprocess.PIPE)
    assert child.stdout.readline() == "waits\n"
    time.sleep(0.2)
    job = [child.pid, *descendants(child.pid)]
    send(job, signal.SIGSTOP)
    time.sleep(STOP_S)
    send(job[::-1], signal.SIGCONT)  # a pool that finds its worker stopped would ask another one
    time.sleep(0.1)
    path.touch()
    assert child.wait(30) == 0


def test_without_a_stop_a_limit_is_over_in_time():
    from gtpo_megatron.errors import WeightSyncError
    from gtpo_megatron.weights.push.transports.channel import wait_until

    began = time.monotonic()
    with pytest.raises(WeightSyncError, match="no bucket within 1 s"):
        wait_until(lambda: False, deadline_s=1.0, complaint=lambda: "no bucket")
    assert 1.0 <= time.monotonic() - began < 3.0


def test_it_counts_all_of_a_long_sleep_and_also_in_a_fork():
    began = running_time()
    time.sleep(4 * MOST_S)
    assert running_time() - began > 3 * MOST_S
    if (child := os.fork()) == 0:
        began = running_time()
        time.sleep(4 * MOST_S)
        os._exit(running_time() - began > 3 * MOST_S)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_of_a_stop_it_counts_half_a_second(monkeypatch):
    now = 100.0
    clock = RunningTime(lambda: now)
    monkeypatch.setattr(clock, "_start", lambda: None)
    assert clock() == 0.0
    for now, counted in [(100.25, 0.25), (3700.25, 0.75), (3700.5, 1.0)]:  # noqa: B007 - the clock reads it
        assert clock() == counted
