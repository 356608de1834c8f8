"""Agents in an environment pool: their requests are openings and replies, their errors failures of their episode."""

import socket
import time

import psutil
import pytest

from gtpo_megatron.conversations.agents import is_agent
from gtpo_megatron.conversations.environment import resolve_environment
from gtpo_megatron.conversations.environment_pool import EnvironmentPool
from gtpo_megatron.conversations.messages import Message, TurnStats
from gtpo_megatron.errors import ConfigError
from tests.unit.conversations import agents, environments
from tests.unit.conversations.test_environment_pool import wait

HERE = "tests.unit.conversations.agents"


def pool_of(name, *, num_workers=1, timeout_s=60.0):
    return EnvironmentPool(f"{HERE}:{name}", num_workers=num_workers, timeout_s=timeout_s, memory_limit_mib=4096)


def opened(pool, *prompts):
    for episode, prompt in enumerate(prompts):
        pool.open(episode, {"prompt": prompt})
    events = wait(pool, len(prompts))
    assert not [one.failure for one in events.values() if one.failure]
    return events


def said(pool, *contents, within_s=60.0):
    for episode, content in enumerate(contents):
        sampled = TurnStats(num_prompt_tokens=10, num_tokens=episode)
        pool.step(episode, Message(role="assistant", content=content, sampled=sampled))
    return wait(pool, len(contents), within_s)


def test_a_hundred_agents_at_once_are_played_to_their_ends():
    with pool_of("counts", num_workers=2) as pool:
        events = opened(pool, *(f"p{one}" for one in range(100)))
        assert [events[one].opening.messages[1].content for one in range(100)] == [f"p{one}" for one in range(100)]
        for turn in range(1, 4):
            replies = said(pool, *(f" é{one} {turn}" for one in range(100)))
            assert [[message.content for message in replies[one].reply.messages] for one in range(100)] == [
                [f" é{one} {turn} {10 + one}"] for one in range(100)
            ]
        last = said(pool, *["done"] * 100)
        assert {(one.reply.done, one.reply.reward) for one in last.values()} == {(True, 8.0)}


@pytest.mark.slow
def test_an_async_agent_reads_streams_and_one_that_is_late_fails_alone():
    with pool_of("waits", timeout_s=15.0) as pool:
        opened(pool, "a", "b")
        events = said(pool, "sleep 60", "go on")
        assert "step took longer than 15 s" in events[0].failure
        assert events[1].reply.messages == (Message(role="user", content="and?"),)
        pool.step(1, Message(role="assistant", content="done", sampled=TurnStats(num_tokens=7)))
        assert wait(pool, 1)[1].reply.reward == 7.0


@pytest.mark.slow
def test_an_agent_that_never_ends_fails():
    with pool_of("obeys", timeout_s=15.0) as pool:
        opened(pool, "go")
        assert "step took longer than 15 s" in said(pool, "sleep 600")[0].failure


@pytest.fixture(scope="module")
def obedient():
    """A pool where a cluster has set a proxy, which would not find the worker."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("http_proxy", "http://127.0.0.1:9")
        with pool_of("obeys") as pool:
            yield pool


@pytest.mark.parametrize(
    ("prompt", "failure"),
    [("return", "the agent returned without having asked the policy anything"), ("raise", "ValueError: no")],
)
def test_one_that_asks_nothing_has_failed(obedient, prompt, failure):
    obedient.open(0, {"prompt": prompt})
    assert failure in wait(obedient, 1)[0].failure


@pytest.mark.parametrize(
    ("content", "failure"),
    [
        ("exit", "SystemExit: 3"),
        ("text is no reward", "the agent returned 'is no reward'"),
        ("show", "the policy reads text alone"),
    ],
)
def test_what_it_does_wrong_fails_its_episode_in_one_line(obedient, content, failure):
    opened(obedient, "go")
    event = said(obedient, content)[0]
    assert failure in event.failure
    assert "\n" not in event.failure


SEVERAL = "its request was refused: logit_bias={'1': 5}: only {} is possible here, since the policy is trained as it is"


@pytest.fixture(scope="module", params=["swallows", "swallows_async"])
def swallowing(request):
    with pool_of(request.param) as pool:
        yield pool


def played(pool, forms):
    """The last event of an agent that asks in these forms; every answer is `hi`."""
    pool.open(0, {"prompt": forms})
    event = wait(pool, 1)[0]
    while not (event.failure or (event.reply and event.reply.done)):
        event = said(pool, "hi")[0]
    return event


@pytest.mark.slow
@pytest.mark.parametrize(
    "forms", ["several", "child", "ask several", "ask child", "ask several scores", "ask ask several"]
)
def test_a_refusal_that_the_agent_catches_fails_its_episode(swallowing, forms):
    event = played(swallowing, forms)
    assert SEVERAL in event.failure
    assert event.num_refused == 1 + ("scores" in forms)
    assert event.refusal.startswith("logit_bias=")
    assert "the agent returned 0.0, which is no reward; its request" in event.failure


@pytest.mark.slow
@pytest.mark.parametrize("forms", ["several ask", "several scores ask", "ask several ask", "child ask"])
def test_a_refusal_that_a_later_turn_mends_is_counted_alone(swallowing, forms):
    event = played(swallowing, forms)
    assert (event.failure, event.reply.reward) == ("", 0.0)
    assert event.num_refused == 1 + ("scores" in forms)
    assert event.refusal.startswith("logit_bias=")


def test_an_error_after_a_refusal_names_both(swallowing):
    event = played(swallowing, "ask several raise")
    assert f"KeyError: 'choices'; {SEVERAL}" in event.failure
    assert "\n" not in event.failure
    assert played(swallowing, "ask several ask raise").failure.endswith("KeyError: 'choices'")


def test_a_request_without_the_key_is_counted_and_named_where_nothing_else_was_asked(swallowing):
    event = played(swallowing, "ask unknown")
    assert (event.failure, event.num_refused) == ("", 1)
    assert event.refusal == "the key is not that of an episode under way"
    event = played(swallowing, "unknown")
    assert "without having asked the policy anything; a request was refused meanwhile: the key is not" in event.failure
    assert played(swallowing, "ask").num_refused == 0


@pytest.mark.slow
@pytest.mark.parametrize("forms", ["late", "late ask"])
def test_a_reward_that_did_not_wait_for_the_last_answer_is_none(swallowing, forms):
    """The client loses its patience; the agent may ask the same once more."""
    opened(swallowing, forms)
    time.sleep(4.0)
    event = said(swallowing, "hi")[0]
    left = "the agent returned 0.0, which is no reward: its last request was not answered yet"
    assert left in event.failure if forms == "late" else event.failure == ""
    assert event.num_refused == 0


def test_a_refusal_that_the_client_raises_is_not_said_twice(obedient):
    opened(obedient, "go")
    event = said(obedient, "show")[0]
    assert event.failure.count("the policy reads text alone") == 1
    assert event.num_refused == 1


def test_an_episode_that_a_limit_ends_refuses_what_is_asked_of_it(obedient, tmp_path):
    opened(obedient, "go")
    told = tmp_path / "told"
    assert said(obedient, f"more {told}")[0].reply.messages == (Message(role="user", content="more"),)
    obedient.end(0)
    end = time.monotonic() + 60
    while not told.exists():
        assert time.monotonic() < end
        time.sleep(0.05)
    assert told.read_text().startswith("409 ")
    assert "the episode has ended, by a limit or a failure" in told.read_text()


def test_agents_are_told_from_what_makes_an_environment():
    assert is_agent(agents.counts)
    assert is_agent(agents.waits)
    assert resolve_environment(f"{HERE}:waits").is_async
    assert not is_agent(environments.made)
    assert not is_agent(environments.NeedsMore)
    assert not is_agent(dict)


def test_agents_of_a_worker_have_the_address_of_its_interface():
    """The machine's own one, or that of another network: where there is none, the loopback."""
    others = {
        name: one.address
        for name, all_of_it in psutil.net_if_addrs().items()
        for one in all_of_it
        if one.family == socket.AF_INET and name != "lo"
    }
    interface = next(iter(others), "lo")
    settings = {"num_workers": 1, "timeout_s": 60.0, "memory_limit_mib": 4096}
    with EnvironmentPool(f"{HERE}:names_its_address", **settings, interface=interface) as pool:
        said_of = opened(pool, "a")[0].opening.messages[0].content
        url, proxies = said_of.split(" ")
        host = others.get(interface, "127.0.0.1")
        assert url.startswith(f"http://{host}:")
        assert host in proxies.split(",")
    with pytest.raises(ConfigError, match="endpoint_interface='none9'"):
        EnvironmentPool(f"{HERE}:names_its_address", **settings, interface="none9")
