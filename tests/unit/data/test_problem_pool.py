"""Problems are drawn by how often they were solved; what a pool knows goes through a checkpoint."""

import json
from collections import Counter

import pytest

from gtpo_megatron.batch import Problem
from gtpo_megatron.config.problems import PoolConfig
from gtpo_megatron.data.problem_pool import ProblemPool
from gtpo_megatron.data.prompt_sampler import PromptSampler
from gtpo_megatron.errors import CheckpointError, ConfigError

ON = PoolConfig(enabled=True)


def sampler_of(num, config=ON, seed=3):
    problems = [Problem(problem_id=f"p{i}", prompt_ids=(i,), answer=str(i)) for i in range(num)]
    return PromptSampler(problems, seed, ProblemPool(config, seed))


def epochs(sampler, num_epochs, solved):
    """Counts of draws in whole epochs, of whose problems ``solved`` gives correct responses of four."""
    found = Counter()
    while True:
        (problem,) = sampler.next(1)
        if sampler.state_dict()["epoch"] == num_epochs:
            return found
        found[problem.problem_id] += 1
        sampler.note({problem.problem_id: (solved(problem.problem_id), 4)})


def test_the_first_epoch_has_all_problems_and_later_ones_those_near_the_target():
    sampler = sampler_of(300, PoolConfig(enabled=True, retire_after=0))
    rates = {f"p{i}": i % 5 for i in range(300)}
    found = epochs(sampler, 40, lambda name: rates[name])
    drawn = [sum(found[name] for name in rates if rates[name] == rate) / (60 * 40) for rate in range(5)]
    # chances 0.1, 0.5, 1, 0.5, 0.1, and all of them in the first epoch
    assert drawn == pytest.approx([0.12, 0.51, 1.0, 0.51, 0.12], abs=0.03)


def test_what_is_solved_is_retired_and_comes_back():
    sampler = sampler_of(2, PoolConfig(enabled=True, floor=1.0, retire_after=2, return_after=3))
    seen = []
    for _ in range(40):
        (problem,) = sampler.next(1)
        sampler.note({problem.problem_id: (4 if problem.problem_id == "p0" else 2, 4)})
        if problem.problem_id == "p0":
            seen.append(sampler.state_dict()["epoch"])
    # two epochs, three without, two again
    assert seen[:6] == [0, 1, 5, 6, 10, 11]


def test_a_wrong_response_begins_the_count_anew():
    pool = ProblemPool(ON, 0)
    for correct in (4, 3, 4):
        pool.note(0, correct, 4, epoch=0)
    assert pool.metrics(0)["prompts/pool_retired_count"] == 0.0
    pool.note(0, 4, 4, epoch=0)
    assert pool.metrics(0) == {
        "prompts/pool_seen_count": 1.0,
        "prompts/pool_retired_count": 1.0,
        "prompts/pool_rate_mean": pytest.approx(0.96875),
    }
    assert [pool.is_retired(0, epoch) for epoch in (4, 5)] == [True, False]


def test_where_all_are_retired_all_come_back():
    sampler = sampler_of(3, PoolConfig(enabled=True, retire_after=1, return_after=100, floor=1.0))
    found = epochs(sampler, 4, lambda _: 4)
    assert set(found.values()) == {4}


def test_a_step_has_each_problem_once_and_twice_only_where_an_epoch_ends():
    """Though nearly all are retired: the rest is filled up with them, and their time runs on by the epoch."""
    sampler = sampler_of(16, PoolConfig(enabled=True, retire_after=1, return_after=1000))
    for _ in range(30):
        drawn = Counter(problem.problem_id for problem in sampler.next(12))
        assert max(drawn.values()) <= 2
        assert len(drawn) >= 8
        sampler.note(dict.fromkeys(drawn, (4, 4)) | ({"p3": (2, 4)} if "p3" in drawn else {}))
    assert sampler.metrics()["prompts/pool_retired_count"] == 15.0


def test_what_is_retired_stays_so_where_another_problem_is_seldom_drawn():
    config = PoolConfig(enabled=True, retire_after=1, return_after=1000, floor=0.0)
    sampler = sampler_of(9, config)
    sampler.note({f"p{i}": (0 if i == 0 else 4, 4) for i in range(9)})
    sampler.next(9)
    assert [sampler.next(1)[0].problem_id for _ in range(5)] == ["p0"] * 5


@pytest.mark.parametrize("steps_before", [0, 5, 33])
def test_a_resumed_sampler_goes_on_exactly(steps_before):
    def play(sampler, num):
        names = []
        for _ in range(num):
            drawn = sampler.next(3)
            names += [problem.problem_id for problem in drawn]
            sampler.note({one.problem_id: (sum(map(ord, one.problem_id)) % 5, 4) for one in drawn})
        return names

    unbroken = sampler_of(12)
    play(unbroken, steps_before)
    resumed = sampler_of(12)
    resumed.load_state_dict(json.loads(json.dumps(unbroken.state_dict())))
    assert play(resumed, 40) == play(unbroken, 40)


def test_a_state_of_a_run_without_a_pool_is_refused():
    plain = PromptSampler([Problem(problem_id="p0", prompt_ids=(0,), answer="0")], 3)
    with pytest.raises(CheckpointError, match="of a run with data.pool.enabled=False; resume with the same"):
        sampler_of(1).load_state_dict(plain.state_dict())
    with pytest.raises(CheckpointError, match="of a run with data.pool.enabled=True; resume with the same"):
        plain.load_state_dict(sampler_of(1).state_dict())
    with pytest.raises(CheckpointError, match="expected .*'order', .*'pool'"):
        sampler_of(1).load_state_dict({"seed": 3})


@pytest.mark.parametrize(
    "change",
    [
        {"order": [0, 0]},
        {"order": [7]},
        {"pool": {"9": [0.5, 0, -1]}},
        {"pool": {"0": [2.0, 0, -1]}},
        {"pool": {"0": [0.5]}},
        {"pool": {"nobody": [0.5, 0, -1]}},
        {"pool": {"0": "x"}},
        {"pool": {"0": [1.0, 1.7, 0.0]}},
        {"pool": {"0": [1.0, -5, -1]}},
        {"pool": {"0": [float("nan"), 0, -1]}},
        {"pool": {"00": [0.5, 0, -1]}},
        {"pool": {"9" * 5000: [0.5, 0, -1]}},
        {"pool": None},
        {"order": [0], "position": 2},
    ],
)
def test_a_damaged_state_is_refused(change):
    sampler = sampler_of(3)
    with pytest.raises(CheckpointError):
        sampler.load_state_dict(sampler.state_dict() | change)


def test_a_target_is_a_rate():
    with pytest.raises(ConfigError, match="target=1.5: must lie between 0 and 1"):
        PoolConfig(target=1.5)
