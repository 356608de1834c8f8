"""A worker that somebody else kills or stops costs no verdict: a resumed run must equal one that was left in peace."""

import os
import signal
import threading
import time

import pytest

from gtpo_megatron.config.reward import RewardConfig
from gtpo_megatron.rewards.request import RewardRequest
from gtpo_megatron.rewards.reward_pool import RewardPool
from gtpo_megatron.supervision.process_tree import descendants

OBEY = "tests.unit.rewards.reward_functions:obey"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_row_whose_worker_is_killed_or_stopped_from_outside_is_graded_again(number):
    with RewardPool(RewardConfig(function=OBEY, num_workers=1, timeout_s=3.0)) as pool:
        pool.grade([RewardRequest(response="warm")])
        [supervisor] = pool.process_ids
        [worker] = descendants(supervisor)
        threading.Timer(0.3, os.kill, (worker, number)).start()
        [verdict] = pool.grade([RewardRequest(response="sleep 1")])
        assert verdict.failure is None
        assert pool.process_ids != [supervisor]


@pytest.mark.slow
def test_a_supervisor_that_is_killed_costs_no_verdict():
    with RewardPool(RewardConfig(function=OBEY, num_workers=1, timeout_s=3.0)) as pool:
        pool.grade([RewardRequest(response="warm")])
        [supervisor] = pool.process_ids
        threading.Timer(0.3, os.kill, (supervisor, signal.SIGKILL)).start()
        [verdict] = pool.grade([RewardRequest(response="sleep 1")])
        assert verdict.failure is None


@pytest.mark.slow
def test_rows_whose_worker_is_killed_are_graded_again_together():
    with RewardPool(
        RewardConfig(function="tests.unit.rewards.reward_forms:rows_in_call", num_workers=1, timeout_s=20.0)
    ) as pool:
        [supervisor] = pool.process_ids
        [worker] = descendants(supervisor)
        os.kill(worker, signal.SIGKILL)
        verdicts = pool.grade([RewardRequest(response=response) for response in "abc"])
        assert [verdict.reward for verdict in verdicts] == [3.0] * 3


@pytest.mark.slow
def test_a_row_that_kills_its_worker_is_not_graded_for_ever():
    with RewardPool(RewardConfig(function=OBEY, num_workers=1, timeout_s=3.0)) as pool:
        started = time.monotonic()
        [verdict] = pool.grade([RewardRequest(response="die")])
        assert verdict.failure is not None
        assert "status -9" in verdict.failure
        assert time.monotonic() - started < 60
