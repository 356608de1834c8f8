"""Whole runs with an environment, on real Megatron-core, vLLM and Ray."""

from pathlib import Path

import pytest

from gtpo_megatron.run_folder.metrics_file import read_metrics
from gtpo_megatron.run_folder.rollout_log import iter_rollouts
from tests.integration.runs import LEAVINGS, Run, steps

pytestmark = [
    pytest.mark.ray,
    pytest.mark.vllm,
    pytest.mark.megatron,
    pytest.mark.timeout(2400),
    pytest.mark.filterwarnings("ignore"),  # of TensorBoard's and transformers' readers
]

RECIPE = "recipes.tiny_cpu:tool_gtpo"
ONE_PROCESS = ["--cluster.mode", "local", "--parallel.num-ranks", "1", "--parallel.tensor-parallel-size", "1"]
CALCULATOR = "recipes.calculator:Calculator"
AGENT = str(Path(__file__).parents[2] / "examples/own_agent/agent.py:agent")
TOKEN_AGENT = "tests.integration.token_agent:agent"
BRANCHING_AGENT = "tests.integration.branching_agent:agent"
TURN_REWARD_COEF = 0.5


def assert_conversations(rows):
    """Some episodes of every step have called the tool, and sampler and trainer agree on the policy's tokens."""
    for row in rows:
        assert row["reward/turns_mean"] > 1
        assert row["rollout/foreign_tokens_count"] > 0
        assert row["sync/logprob_gap_mean"] < 1e-5


def assert_last_turns_are_rewarded(records):
    """The calculator rewards the last turn alone, which earns the whole outcome, 1 or 0."""
    for record in records:
        last_turn = record.foreign_spans[-1][1] if record.foreign_spans else 0
        if record.reward == 1:
            assert min(record.shaped_rewards[last_turn:]) >= 1 + TURN_REWARD_COEF
        else:
            assert max(record.shaped_rewards[last_turn:]) <= -1


def rows_of_a_killed_run(tmp_path, *options, num_steps):
    """The rows of an unbroken run, which are those of one that was killed in its last step but one and resumed."""
    whole = Run(tmp_path / "whole", *options, recipe=RECIPE, num_steps=num_steps)
    whole.succeed()
    broken = Run(tmp_path / "broken", *options, recipe=RECIPE, num_steps=num_steps)
    broken.wait_for(rf"step {num_steps - 1}/{num_steps}")
    broken.kill()
    Run(tmp_path / "broken", *options, "--resume", recipe=RECIPE, num_steps=num_steps).succeed()
    rows = steps(whole.folder)
    assert steps(tmp_path / "broken") == rows
    return rows


@pytest.mark.nightly
@LEAVINGS
def test_a_killed_run_with_an_environment_equals_an_unbroken_one(tmp_path):
    option = ("--algorithm.turn-reward-coef", str(TURN_REWARD_COEF))
    rows = rows_of_a_killed_run(tmp_path, *option, num_steps=4)
    assert_conversations(rows[1:])
    assert all(row["timing/environment_s"] > 0 for row in read_metrics(tmp_path / "whole" / "metrics.jsonl")[1:])
    records = list(iter_rollouts(tmp_path / "whole" / "rollouts" / "step_000004.jsonl"))
    assert any(record.foreign_spans for record in records)
    assert_last_turns_are_rewarded(records)


def rows_in_one_process(folder, *options):
    run = Run(folder, *options, *ONE_PROCESS, recipe=RECIPE, num_steps=2)
    assert run.wait(900.0) == 0, run.output[-3000:]
    return steps(run.folder)


@pytest.fixture(scope="module")
def by_the_environment(tmp_path_factory):
    return rows_in_one_process(tmp_path_factory.mktemp("environment") / "run")


@pytest.mark.slow
@LEAVINGS
@pytest.mark.parametrize(
    "agent", [AGENT, pytest.param(TOKEN_AGENT, marks=pytest.mark.nightly)], ids=["messages", "tokens"]
)
def test_an_agent_that_knows_only_an_endpoint_is_trained_as_the_environment_is(by_the_environment, tmp_path, agent):
    """By messages from threads, or by tokens from an event loop, it plays the calculator's game over HTTP; its run is
    the environment's bit for bit."""
    rows = rows_in_one_process(tmp_path / "run", "--environment.name", agent)
    assert_conversations(rows[1:])
    assert all(row["rollout/reward_failed_count"] == 0 for row in rows[1:])
    pairs = zip(rows, by_the_environment, strict=True)
    differing = {
        key for row, other in pairs for key in row if row[key] != other.get(key, 0)
    }  # counts of an agent alone
    assert differing <= {"reward/tool_errors_mean"}  # an agent does not say that a call has failed


def assert_branches(rows):
    for row in rows:
        assert row["rollout/branches_count"] > 0
        assert row["rollout/requests_refused_count"] == row["rollout/reward_failed_count"] == 0
        assert row["sync/logprob_gap_mean"] < 1e-5
        assert row["optimizer/grad_norm"] > 0


@pytest.mark.slow
@LEAVINGS
def test_episodes_that_branch_are_trained(tmp_path):
    rows = rows_in_one_process(tmp_path / "run", "--environment.name", BRANCHING_AGENT, *SHAPES)
    assert_branches(rows[1:])
    records = list(iter_rollouts(tmp_path / "run" / "rollouts" / "step_000002.jsonl"))
    assert any(len(record.branches) == 4 for record in records)


SHAPES = (
    "--environment.max-turns",
    "8",
    "--algorithm.one-sided-groups",
    "keep",
    "--algorithm.turn-reward-coef",
    str(TURN_REWARD_COEF),
)
"""All turns of an episode, and a gradient also where all answers are wrong."""


@pytest.mark.nightly
@LEAVINGS
def test_a_killed_run_whose_episodes_branch_equals_an_unbroken_one(tmp_path):
    """On ranks of their own, by turns; what is saved are prompts and weights, so nothing of a tree."""
    options = ("--environment.name", BRANCHING_AGENT, "--algorithm.entropy-axis", "turn", *SHAPES)
    rows = rows_of_a_killed_run(tmp_path, *options, num_steps=3)
    assert_branches(rows[1:])


@pytest.mark.nightly
@LEAVINGS
@pytest.mark.parametrize("name", [CALCULATOR, AGENT], ids=["environment", "agent"])
def test_episodes_go_on_over_a_push(tmp_path, name):
    """Sampling is slow, so that every push finds episodes between two turns or inside of one."""
    options = (
        *("--environment.name", name),
        *("--rollout.max-staleness", "2", "--rollout.partial", "--algorithm.off-policy.mode", "truncate"),
        *("--rollout.max-concurrent-sequences", "1", "--rollout.group-size", "8"),
    )
    run = Run(tmp_path / "run", *options, recipe=RECIPE, num_steps=5)
    run.succeed()
    rows = steps(run.folder)[1:]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert all(row["rollout/staleness_count"] <= 2 for row in rows)
    assert any(row["rollout/multi_version_count"] > 0 for row in rows), "no push found responses in flight"
    assert all(row["rollout/reward_failed_count"] == 0 for row in rows)
    assert any(row["reward/turns_mean"] > 1 for row in rows)
