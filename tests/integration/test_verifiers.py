"""Tasksets of verifiers, played by verifiers itself, in an interpreter of its own: make test-verifiers."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from gtpo_megatron.conversations.environment import resolve_environment
from gtpo_megatron.conversations.environment_pool import EnvironmentPool
from gtpo_megatron.conversations.messages import Message, ToolCall
from gtpo_megatron.conversations.verifiers import main
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.run_folder.rollout_log import iter_rollouts
from gtpo_megatron.supervision.process_tree import command_line, descendants
from tests.integration.runs import Run, steps
from tests.integration.test_evaluate import finish, launch
from tests.unit.companions.evaluate.makers import saved_verdicts
from tests.unit.conversations.test_environment_pool import wait

PYTHON = Path(__file__).parents[2] / ".venv-verifiers/bin/python"
NAME = f"verifiers:gtpo-adder?python={PYTHON}"
WITHOUT_SERVER = f"{NAME}&taskset.has_server=false"
PROMPT = "Compute %d+7. Put the answer in \\boxed{}."
START_S = 400.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.exists(), reason="needs verifiers: make test-verifiers"),
]


def pool_of(name, *, timeout_s=START_S):
    return EnvironmentPool(name, num_workers=1, timeout_s=timeout_s, memory_limit_mib=4096)


def rows(capsys, name=WITHOUT_SERVER):
    assert main([name]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def opened(pool, rows, *moods):
    """Episodes of the first task in these moods, from 0 on; their events."""
    for episode, mood in enumerate(moods):
        pool.open(episode, {**rows[0], "task": {**rows[0]["task"], "mood": mood}})
    return wait(pool, len(moods), START_S)


def said(pool, *turns):
    for episode, turn in enumerate(turns):
        pool.step(episode, turn if isinstance(turn, Message) else Message(role="assistant", content=turn))
    return wait(pool, len(turns), START_S)


def test_episodes_with_a_tool_are_played_side_by_side(capsys):
    table = rows(capsys, f"{NAME}&select.skip=1")
    assert [(row["prompt"], row["answer"]) for row in table] == [(PROMPT % 1, "8"), (PROMPT % 2, "9")]
    with pool_of(NAME) as pool:
        events = opened(pool, table, "", "", "")
        assert [message.content for message in events[0].opening.messages] == [PROMPT % 1]
        assert [tool["function"]["name"] for tool in events[0].opening.tools] == ["calculate"]
        call = ToolCall(name="calculate", arguments={"expression": "1+7"})
        replies = said(pool, *[Message(role="assistant", content="So:", tool_calls=(call,))] * 3)
        assert [[one.content for one in replies[at].reply.messages] for at in range(3)] == [["8"]] * 3
        last = said(pool, "It is 8.", "It is 9.", "8")
        assert [last[at].reply.reward for at in range(3)] == [0.5, 0.0, 0.5]
        assert last[0].reply.parts == {"is_right": 0.5, "num_turns": 2.0}


def test_what_is_wrong_with_an_episode_fails_it_alone_in_one_line(capsys):
    with pool_of(WITHOUT_SERVER) as pool:
        events = opened(pool, rows(capsys), "raise", "nan", "rewrite", "")
        assert "TaskError: task setup: ValueError: this task is no good" in events[0].failure
        for episode in (1, 2, 3):
            pool.step(episode, Message(role="assistant", content="7"))
        events = wait(pool, 3, START_S)
        assert events[1].failure.endswith("step raised is_right is nan")
        assert "\n" not in events[1].failure
        assert not events[2].failure  # it asks with another history, as another agent may
        assert not events[2].is_last
        assert events[3].reply.reward == 0.5


def replaced(pool, processes):
    end = time.monotonic() + START_S
    while pool.process_ids == processes:
        assert time.monotonic() < end
        assert not pool.poll(0.2)


def test_one_that_hangs_is_late_and_one_that_blocks_or_ends_its_process_has_it_replaced(capsys):
    table = rows(capsys)
    with pool_of(WITHOUT_SERVER, timeout_s=40.0) as pool:
        opened(pool, table, "hang", "")
        processes = pool.process_ids
        pool.step(0, Message(role="assistant", content="7"))
        assert "step took longer than 40 s" in wait(pool, 1, START_S)[0].failure
        pool.step(1, Message(role="assistant", content="7"))
        assert wait(pool, 1, START_S)[1].reply.reward == 0.5
        assert pool.process_ids == processes
        opened(pool, table, "exit", "")
        pool.step(0, Message(role="assistant", content="7"))
        events = wait(pool, 2, START_S)
        assert "its worker ended with status 1 during this call" in events[0].failure
        assert events[1].is_lost
        opened(pool, table, "block")
        assert pool.process_ids != processes
        processes = pool.process_ids
        assert "step took longer than 40 s" in said(pool, "7")[0].failure
        replaced(pool, processes)
        opened(pool, table, "")
        [host] = [one for one in descendants(pool.process_ids[0]) if "-I" in command_line(one)]
        os.kill(host, signal.SIGKILL)
        event = wait(pool, 1, START_S)[0]
        assert event.is_lost
        assert "its worker ended with status 1" in event.failure
        opened(pool, table, "")
        assert said(pool, "7")[0].reply.reward == 0.5


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("&taskset.number=3", "taskset.number Extra inputs are not permitted"),
        ("&id=user-sim", "assistant, user of its agents would ask the policy, and one must"),
        ("&agent.harness.id=none-such", "harness 'none-such' not found"),
    ],
)
def test_what_cannot_be_played_is_said_before_anything_starts(options, why):
    with pytest.raises(ConfigError, match=why):
        resolve_environment(NAME + options)
    with pytest.raises(ConfigError, match="taskset 'no-such' not found"):
        resolve_environment(f"verifiers:no-such?python={PYTHON}")


@pytest.mark.ray
@pytest.mark.vllm
@pytest.mark.megatron
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore")  # of TensorBoard's and transformers' readers
def test_a_run_learns_from_it_goes_on_after_a_kill_and_is_measured(tmp_path, capsys):
    options = ["--environment.name", WITHOUT_SERVER, "--cluster.mode", "local"]
    options += ["--parallel.num-ranks", "1", "--parallel.tensor-parallel-size", "1"]
    for option, part in {"data.train-path": "limit=30", "evaluation.path": "skip=30"}.items():
        file = tmp_path / f"{part}.jsonl"
        table = rows(capsys, f"{WITHOUT_SERVER}&taskset.num=36&select.{part}")
        file.write_text("".join(json.dumps(row) + "\n" for row in table))
        options += [f"--{option}", str(file)]
    options += ["--cluster.start-deadline-s", "900", "--cluster.stage-deadline-s", "900"]
    recipe = "recipes.tiny_cpu:tool_gtpo"
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run = Run(whole, *options, recipe=recipe, num_steps=3)
    assert run.wait(1500) == 0, run.output[-3000:]
    for row in steps(whole)[1:]:
        assert row["reward/num_turns_mean"] == row["reward/turns_mean"] > 1
        assert row["sync/logprob_gap_mean"] < 1e-5
        assert row["rollout/foreign_tokens_count"] > 0
    records = list(iter_rollouts(whole / "rollouts/step_000002.jsonl"))
    assert {record.reward for record in records} <= {0.0, 0.5}
    assert any(record.foreign_spans for record in records)

    run = Run(broken, *options, recipe=recipe, num_steps=3)
    run.wait_for("step 2/3 ", 900)
    run.wait_for("step_2 is complete", 900)
    run.kill()
    run = Run(broken, *options, "--resume", recipe=recipe, num_steps=3)
    assert run.wait(1500) == 0, run.output[-3000:]
    assert steps(broken) == steps(whole)

    output = tmp_path / "evaluated"
    arguments = ["evaluate", str(whole), "--samples", "2", "--output", str(output)]
    status, text = finish(launch(arguments, output), output, 900)
    assert status == 0, text[-3000:]
    verdicts = saved_verdicts(output / "verdicts.jsonl")
    assert len(verdicts) == 12
    whole_ones = [row for row in verdicts if row.failure is None]
    assert len(whole_ones) > 6
    assert all(row.parts["num_turns"] == row.parts["turns"] for row in whole_ones)
    # the harness knows sums of two numbers only
    assert all("HarnessError" in row.failure for row in verdicts if row.failure is not None)
