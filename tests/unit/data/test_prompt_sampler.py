import json

import pytest

from gtpo_megatron.batch import Problem
from gtpo_megatron.data.prompt_sampler import PromptSampler
from gtpo_megatron.errors import CheckpointError, ConfigError, DataError


def problems(num, prefix="p"):
    return [Problem(problem_id=f"{prefix}{i}", prompt_ids=(i,), answer=str(i)) for i in range(num)]


def ids(dealt):
    return [problem.problem_id for problem in dealt]


def test_every_problem_comes_once_an_epoch_in_another_order():
    sampler = PromptSampler(problems(50), seed=1)
    first, second = ids(sampler.next(50)), ids(sampler.next(50))
    assert sorted(first) == sorted(second) == sorted(ids(problems(50)))
    assert first != second
    assert sampler.state_dict()["epoch"] == 1


def test_the_order_depends_on_the_seed_and_not_on_the_size_of_a_step():
    by_seven, by_three = PromptSampler(problems(20), seed=4), PromptSampler(problems(20), seed=4)
    stream = [i for _ in range(9) for i in ids(by_seven.next(7))]
    assert stream == [i for _ in range(21) for i in ids(by_three.next(3))]
    assert stream != [i for _ in range(9) for i in ids(PromptSampler(problems(20), seed=5).next(7))]


def test_the_order_is_pinned():
    # A changed order would silently break resuming from checkpoints of an older version.
    assert ids(PromptSampler(problems(6), seed=7).next(6)) == ["p1", "p4", "p3", "p0", "p2", "p5"]


@pytest.mark.parametrize("steps_before", [0, 3, 4, 11])
def test_a_resumed_sampler_goes_on_exactly(steps_before):
    unbroken = PromptSampler(problems(12), seed=9)
    for _ in range(steps_before):
        unbroken.next(3)
    state = json.loads(json.dumps(unbroken.state_dict()))
    resumed = PromptSampler(problems(12), seed=9)
    resumed.next(5)
    resumed.load_state_dict(state)
    assert [ids(resumed.next(5)) for _ in range(6)] == [ids(unbroken.next(5)) for _ in range(6)]


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (PromptSampler(problems(12), seed=2), "seed"),
        (PromptSampler(problems(13), seed=1), "num_problems"),
        (PromptSampler(problems(12, "q"), seed=1), "fingerprint"),
    ],
)
def test_a_state_of_another_run_is_refused(other, named):
    with pytest.raises(CheckpointError, match=named):
        PromptSampler(problems(12), seed=1).load_state_dict(other.state_dict())


def test_a_broken_state_is_refused():
    sampler = PromptSampler(problems(12), seed=1)
    with pytest.raises(CheckpointError, match="keys"):
        sampler.load_state_dict({"epoch": 0})
    with pytest.raises(CheckpointError, match="position is 13, expected from 0 to 12"):
        sampler.load_state_dict({**sampler.state_dict(), "position": 13})


@pytest.mark.parametrize("num", [0, 4])
def test_more_problems_than_there_are_is_a_config_error(num):
    with pytest.raises(ConfigError, match="between 1 and the number of problems, 3"):
        PromptSampler(problems(3), seed=0).next(num)


def test_no_problems_is_an_error():
    with pytest.raises(DataError, match="no problems"):
        PromptSampler([], seed=0)
