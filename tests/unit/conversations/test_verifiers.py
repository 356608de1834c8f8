"""Our side of tasksets of verifiers, with a stand-in for the process that has verifiers; the real one is asked in
tests/integration/test_verifiers.py."""

import json
import sys
import time

import pytest

from gtpo_megatron.config.environment import EnvironmentConfig
from gtpo_megatron.conversations.environment import resolve_environment
from gtpo_megatron.conversations.environment_pool import EnvironmentPool, worker_settings
from gtpo_megatron.conversations.messages import Message
from gtpo_megatron.conversations.verifiers import LOAD_LIMIT_S, main, parse_taskset
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.supervision.process_tree import descendants
from tests.unit.conversations.test_environment_pool import wait

STAND_IN = """\
#!%s
import json, os, sys, threading, time, urllib.request

told = json.loads(sys.argv[3])
assert sys.argv[1] == "-I" and sys.argv[2].endswith("verifiers_host.py")

def say(**content):
    print(json.dumps(content), flush=True)

def asked(of, text):
    body = json.dumps({"model": "any", "messages": [{"role": "user", "content": text}]}).encode()
    headers = {"Authorization": "Bearer " + of["api_key"]}
    request = urllib.request.Request(of["base_url"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]

if told["taskset"] == "unknown":
    say(refused="no such taskset")
elif told["taskset"] == "dies":
    sys.exit(7)
elif told["taskset"] == "speaks":
    say(hello="you")
else:
    say(ready="0.4.0")
    if told["mode"] == "rows":
        for number in range(0 if "num" in told["options"] else 2):
            say(prompt="p", task={"number": number, "environment": sorted(os.environ)}, taskset=told["taskset"])
        if "short" not in told["options"]:
            say(done=0 if "num" in told["options"] else 2)
    else:
        stops = threading.Event()
        def play(of):
            said = asked(of, of["task"]["say"])
            if said == "die":
                os._exit(9)
            if said == "deaf":
                stops.set()
            if said == "much":
                print("x" * (5 << 20), flush=True)
            if said[0] == "{":
                say(id=of["id"], **json.loads(said))
        for line in sys.stdin:
            while stops.is_set():
                time.sleep(1)
            of = json.loads(line)
            assert not [one for one in sys.argv if of.get("api_key", "none") in one]
            if "cancel" in of:
                say(id=of["cancel"], error="cancelled")
            else:
                threading.Thread(target=play, args=[of], daemon=True).start()
"""


@pytest.fixture
def python(tmp_path):
    file = tmp_path / "python"
    file.write_text(STAND_IN % sys.executable)
    file.chmod(0o755)
    return str(file)


def pool_of(python, *, timeout_s=30.0):
    name = f"verifiers:adder?python={python}"
    return EnvironmentPool(name, num_workers=1, timeout_s=timeout_s, memory_limit_mib=4096)


def said(pool, *contents, first=0):
    """The events of episodes to which the policy says these."""
    episodes = range(first, first + len(contents))
    for episode in episodes:
        pool.open(episode, {"prompt": "p", "task": {"say": f"to {episode}"}, "taskset": "adder"})
    events = wait(pool, len(contents))
    assert not [event.failure for event in events.values() if event.failure]
    assert [events[one].opening.messages[0].content for one in episodes] == [f"to {one}" for one in episodes]
    for episode, content in zip(episodes, contents, strict=True):
        pool.step(episode, Message(role="assistant", content=content))
    return wait(pool, len(contents))


def test_a_name_is_read_and_what_is_wrong_with_it_said(python, monkeypatch):
    monkeypatch.setenv("A_KEY", "a")
    monkeypatch.setenv("B", "b")
    taskset = parse_taskset(f"verifiers:my-tasks?python={python}&taskset.split=train&env=A_KEY, B&agent.max_turns=3")
    assert taskset.taskset == "my-tasks"
    assert taskset.passed == ("A_KEY", "B")
    assert taskset.options == {"taskset.split": "train", "agent.max_turns": "3"}
    EnvironmentConfig(name=taskset.name)
    for name, why in {
        "verifiers:my-tasks": "must be written verifiers:TASKSET\\?python=",
        f"verifiers:?python={python}": "must be written verifiers:TASKSET",
        "verifiers:my-tasks?python=no/such/python": "there is no interpreter no/such/python in /",
        f"verifiers:my-tasks?python={python}&split": "'split' is no option",
        f"verifiers:my-tasks?python={python}&env=A_KEY,NO_KEY": "env=NO_KEY: not set",
        f"verifiers:my-tasks?python={python}&taskset.id=other": "taskset.id is not yours to set",
        f"verifiers:my-tasks?python={python}&interception.type=x": "interception.type is not yours to set",
    }.items():
        with pytest.raises(ConfigError, match=why):
            parse_taskset(name)


@pytest.mark.parametrize(
    ("taskset", "why"),
    [("unknown", "no such taskset"), ("dies", "ended with status 7"), ("speaks", "is no Python, or")],
)
def test_a_taskset_that_cannot_be_loaded_is_said_before_anything_starts(python, taskset, why):
    with pytest.raises(ConfigError, match=why):
        resolve_environment(f"verifiers:{taskset}?python={python}")


def test_rows_are_written_and_the_process_gets_few_variables(python, capsys, monkeypatch):
    monkeypatch.setenv("A_KEY", "a")
    monkeypatch.setenv("OTHER_KEY", "b")
    assert main([f"verifiers:adder?python={python}&env=A_KEY"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["task"]["number"] for row in rows] == [0, 1]
    assert {"A_KEY", "PATH"} <= set(rows[0]["task"]["environment"])
    assert not {"OTHER_KEY", "PYTHONPATH"} & set(rows[0]["task"]["environment"])
    assert main([f"verifiers:adder?python={python}&num=0"]) == 1
    assert "has no tasks" in capsys.readouterr().err
    assert main([f"verifiers:adder?python={python}&short=1"]) == 1
    assert "ended after 2 rows, before the last" in capsys.readouterr().err


def test_rewards_and_failures_are_those_of_their_episodes(python):
    with pool_of(python) as pool:
        right = '{"reward": 0.5, "parts": {"is_right": 1}}'
        events = said(pool, right, '{"error": "TaskError: no"}', '{"reward": NaN, "parts": {}}', right)
        assert events[0].reply.reward == 0.5
        assert events[0].reply.parts == {"is_right": 1}
        assert events[0].reply.done
        assert events[1].failure.endswith("step raised TaskError: no")
        assert "reward is" in events[2].failure
        assert events[3].reply.done
        pool.open(9, {"prompt": "p"})
        assert "the row has no task of verifiers; rows are written by: python -m" in wait(pool, 1)[9].failure
        pool.open(10, {"prompt": "p", "task": {}, "taskset": "other"})
        assert "the row is of the taskset 'other', expected 'adder'" in wait(pool, 1)[10].failure


@pytest.mark.slow
@pytest.mark.parametrize("content", ["die", "much"])
def test_a_process_that_ends_or_writes_too_much_is_replaced(python, content):
    with pool_of(python) as pool:
        [supervisor] = pool.process_ids
        assert "its worker ended with status 1 during this call" in said(pool, content)[0].failure
        assert not descendants(supervisor)
        assert said(pool, '{"reward": 1, "parts": {}}', first=1)[1].reply.done


@pytest.mark.slow
def test_one_that_is_late_fails_alone_and_one_that_does_not_hear_is_replaced(python):
    with pool_of(python, timeout_s=3.0) as pool:
        processes = pool.process_ids
        assert "step took longer than 3 s" in said(pool, "late")[0].failure
        assert said(pool, '{"reward": 1, "parts": {}}', first=1)[1].reply.done
        assert pool.process_ids == processes
        assert "step took longer than 3 s" in said(pool, "deaf", first=2)[2].failure
        end = time.monotonic() + 60
        while pool.process_ids == processes:
            assert time.monotonic() < end
            assert not pool.poll(0.2)
        assert said(pool, '{"reward": 1, "parts": {}}', first=3)[3].reply.done


def test_a_worker_has_the_time_that_its_taskset_may_take_to_load():
    limit, usual = (
        worker_settings(name, timeout_s=1.0, memory_limit_mib=0).start_limit_s
        for name in ("verifiers:mine?python=python", "mine.py:Game")
    )
    assert limit == LOAD_LIMIT_S + usual
