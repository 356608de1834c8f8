"""The time of a row grows with its tests; a row that runs out of it says so, and is not called wrong."""

import json

import pytest

from gtpo_megatron.config.reward import RewardConfig
from gtpo_megatron.rewards.code_tests import SHARE_OF_LIMIT, limit_s
from gtpo_megatron.rewards.function import states
from gtpo_megatron.rewards.request import RewardRequest
from gtpo_megatron.rewards.reward_pool import RewardPool
from gtpo_megatron.sandbox.choose import UnsafeSandbox
from tests.unit.rewards.test_code_tests import fenced, graded

SLEEPING = "import time\ntime.sleep({})\nprint(input())"


def row(num, **columns):
    return {"tests": [{"input": "1\n", "output": "1\n"}] * num, **columns}


@pytest.fixture(scope="module")
def sandbox():
    made = UnsafeSandbox()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("columns", "program_s"),
    [
        (row(1), 8.0),
        (row(8), 8.0),
        (row(60), 60.0),
        (row(60, time_limit=6), 60.0),
        (row(60, time_limit=6, comparison="livecodebench"), 360.0),
        (row(1, time_limit=6, comparison="livecodebench"), 8.0),
        (row(60, language="cpp"), 120.0),  # half of it is the compiler's
    ],
)
def test_every_test_pays_for_a_tenth_of_the_limit_and_a_benchmark_has_its_own(columns, program_s):
    request = RewardRequest(response="", columns_json=json.dumps(columns), limit_s=10.0)
    assert SHARE_OF_LIMIT * limit_s(request) == pytest.approx(program_s)


def test_a_row_that_is_out_of_time_says_so(sandbox):
    found = graded(sandbox, fenced(SLEEPING.format(0.6)), row(5), limit_s=2.0)
    names = [one.split(":")[0] for one in found.info["tests"]]
    assert names == ["passed", "passed", "out of time", "not run", "not run"]
    assert found.info["time"].endswith("raise reward.timeout_s")
    assert found.parts["out_of_time"] == 1.0
    found = graded(sandbox, fenced(SLEEPING.format(9)), row(2, time_limit=0.5), limit_s=20.0)
    assert [one.split(":")[0] for one in found.info["tests"]] == ["timeout", "not run"]
    assert (found.parts["out_of_time"], "time" in found.info) == (0.0, False)


@pytest.mark.slow
def test_in_the_pool_a_row_of_many_tests_has_the_time_for_them():
    function = "gtpo_megatron.rewards.code_tests:code_tests"
    rows = [
        RewardRequest(response=fenced(SLEEPING.format(seconds)), columns_json=json.dumps(columns))
        for seconds, columns in (
            (0.15, row(25)),  # some 4 s, where the limit of a row is 3 s
            (0.5, row(8, comparison="livecodebench", time_limit=6)),
            (0, row(1)),
        )
    ]
    with RewardPool(RewardConfig(function=function, num_workers=1, timeout_s=3.0, sandbox="unsafe")) as pool:
        verdicts = pool.grade(rows)
        hurried = pool.grade(rows[:1], budget_s=2.0)
    assert [(one.reward, one.failure) for one in verdicts] == [(1.0, None)] * 3
    assert hurried[0].kind == "over_budget"


@states(limit_s=lambda request: float(request.columns["seconds"]))
def slow(request):
    """Says how long it takes, and takes longer where it is asked to."""
    import time

    time.sleep(request.columns["takes"])
    return request.limit_s


@pytest.mark.slow
def test_what_a_function_says_of_a_row_is_its_limit():
    rows = [
        RewardRequest(response="", columns_json=json.dumps({"seconds": seconds, "takes": takes}))
        for seconds, takes in ((3.0, 1.5), (2.0, 9.0), (0.1, 0.0))
    ]
    bare = RewardRequest(response="", columns_json='{"takes": 0}')
    with RewardPool(RewardConfig(function=f"{__file__}:slow", num_workers=1, timeout_s=1.0)) as pool:
        verdicts = pool.grade([*rows, bare])
    assert [one.reward for one in verdicts] == [3.0, 0.0, 1.0, 1.0]
    assert [one.failure for one in verdicts] == [None, "took longer than 2 s", None, None]
