import asyncio
import dataclasses
import json

import pytest

from gtpo_megatron.conversations.environment import Episode, resolve_environment
from gtpo_megatron.conversations.messages import (
    Message,
    Opening,
    Reply,
    ToolCall,
    TurnStats,
    message_json,
    message_of_json,
    opening_json,
    opening_of_json,
    reply_json,
    reply_of_json,
)
from gtpo_megatron.conversations.openai_form import message_from, opening_from, reply_from
from gtpo_megatron.errors import ConfigError, DataError

HERE = "tests.unit.conversations.environments"


def episode(name):
    async def run(method):
        return method()

    return Episode(resolve_environment(f"{HERE}:{name}"), run)


def play(name, row, *contents):
    """What an environment says to the messages, and its last reply."""

    async def played():
        one = episode(name)
        said: list = [await one.open(row)]
        said += [await one.step(Message(role="assistant", content=content)) for content in contents]
        await one.close()
        return said

    return asyncio.run(played())


def test_an_environment_is_played():
    opening, first, last = play("Echo", {"prompt": "hello"}, "a", "done")
    assert opening == Opening(messages=(Message(role="user", content="hello"),))
    assert first == Reply(messages=(Message(role="user", content="1 a"),), reward=0.5)
    assert last == Reply(done=True, reward=2.0, parts={"turns": 2.0})


@pytest.mark.parametrize("name", ["Waiting", "made"])
def test_an_async_one_and_one_that_a_function_makes_are_played_too(name):
    assert play(name, {"prompt": "x"}, "go")[-1] == Reply(done=True)


def test_tokens_cross_the_pipe_as_they_are():
    opening, reply = Opening(token_ids=(1, 2)), Reply(token_ids=(3,))
    assert opening_of_json(json.loads(json.dumps(opening_json(opening)))) == opening
    assert reply_of_json(json.loads(json.dumps(reply_json(reply)))) == reply
    sampled = TurnStats(num_prompt_tokens=2, num_tokens=1, is_cut=True, token_ids=(4,), logprobs=(-0.5,))
    turn = Message(role="assistant", content="x", sampled=sampled)
    assert message_of_json(json.loads(json.dumps(message_json(turn)))) == turn


def test_tools_are_played_in_both_shapes():
    assert [tool["function"]["name"] for tool in play("OfTrl", {"prompt": "x"})[0].tools] == ["add", "step"]
    assert play("Calculator", {"prompt": "x", "answer": "3"}, "3")[-1].reward == 1.0
    assert play("AsyncTools", {"prompt": "x"}, "3")[-1].reward == 1.0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Ecko", "did you mean .*:Echo"),
        ("NOT_A_CLASS", "lacks it"),
        ("NeedsMore", "it cannot be made without arguments: missing a required argument: 'needed'"),
        ("NoReset", r"it has no reset; expected reset\(row\) and step\(message\), or reset"),
        ("Undescribed", "Undescribed': tool 'tool': its argument 'what' has no annotation"),
    ],
)
def test_what_is_no_environment_is_a_config_error(name, said):
    with pytest.raises(ConfigError, match=said):
        resolve_environment(f"{HERE}:{name}")


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("nan", "step returned a Reward of value nan; expected a finite number"),
        ("huge", "scale it down"),
        ("text", "step returned 'a text'; expected a Reply"),
        ("none", "step returned None; expected a Reply"),
        ("done-with-messages", "step returned done with messages"),
        ("nothing", "step returned neither done nor a message"),
        ("tokens-and-messages", "step returned both token ids and messages; expected one of them"),
        ("tokens", "step: got 2.5, expected token ids"),
        ("assistant", "step returned a message of the assistant, for which the policy speaks"),
        ("role", "step: a message has role='robot'; expected one of system, user, assistant, tool"),
        ("key", "step: a message has the key 'contents'; known: role, content"),
        ("number", "step: a message has content=3; expected text"),
        ("surrogate", "half a surrogate pair"),
        ("part", "named a part 'Bad Name'"),
        ("errors", "num_tool_errors=-1"),
    ],
)
def test_what_an_environment_returns_is_checked_in_a_line_that_names_it(what, said):
    with pytest.raises(DataError, match=said) as caught:
        play("Obedient", {"prompt": "fine"}, f"give {what}")
    assert str(caught.value).startswith(f"environment '{HERE}:Obedient': step")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (3, "returned 3; expected an Opening"),
        ([], "of which the last is none"),
        ([Message(role="assistant")], "the last is one of the assistant"),
        (Opening(token_ids=(1,), messages=(Message(role="user"),)), "returned both token ids and messages or tools"),
        (Opening(token_ids=(1, -1)), "got -1, expected token ids"),
        ([Message(role="user"), 3], "got 3, expected a Message"),
        (
            Opening(messages=(Message(role="user"),), tools=({"name": "f"},)),
            "returned the tool {'name': 'f'}; expected",
        ),
        (
            Opening(messages=(Message(role="user"),), tools=({"type": "function", "function": {"name": "f"}},) * 2),
            "two tools called 'f'",
        ),
        (
            Opening(
                messages=(Message(role="user"),),
                tools=({"type": "function", "function": {"name": "f", "parameters": {1, 2}}},),
            ),
            "tools that JSON does not have",
        ),
        ([{"role": "user", "tool_calls": [{"function": {"name": "f"}}]}], "only the assistant's may"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1"}}]}], "not valid JSON"),
        ([{"role": "assistant", "tool_calls": [{"name": "f"}]}], "got the call {'name': 'f'}, expected"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 3}}]}], "arguments 3; expected"),
        ([{"role": "user", "content": [{"type": "image"}]}], "expected text"),
    ],
)
def test_openings_are_checked(returned, said):
    with pytest.raises(DataError, match=said.replace("[", r"\[").replace("{", r"\{")):
        opening_from(returned, "reset")


def test_an_exception_is_one_line_and_its_traceback_goes_to_stderr(capsys):
    with pytest.raises(DataError, match=r"Obedient': step raised ValueError: no such unit$"):
        play("Obedient", {"prompt": "fine"}, "raise no such\n unit")
    assert "in obey" in capsys.readouterr().err
    with pytest.raises(DataError, match="step raised SystemExit: 3"):
        play("Obedient", {"prompt": "fine"}, "exit")


def test_no_reply_comes_before_reset_or_after_done():
    with pytest.raises(DataError, match="asked for a reply after done"):
        play("Echo", {"prompt": "x"}, "done", "done")
    with pytest.raises(DataError, match="asked for a reply before reset"):
        asyncio.run(episode("Echo").step(Message(role="assistant")))


FULL = Message(
    role="assistant",
    content="né",
    reasoning="why",
    tool_calls=(ToolCall(name="f", arguments={"a": [1, {"b": None}]}, call_id="c"), ToolCall(name="g", arguments={})),
    malformed_calls=("no brace",),
)


def test_openais_form_is_a_message():
    calls = [
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": [1, {"b": None}]}}},
        {"type": "function", "function": {"name": "g", "arguments": {}}},
    ]
    full = {"role": "assistant", "content": "né", "reasoning_content": "why", "tool_calls": calls}
    assert message_from(full | {"malformed_calls": ["no brace"]}, "here") == FULL
    result = {"role": "tool", "content": "3", "name": "f", "tool_call_id": "c"}
    assert message_from(result, "here") == Message(role="tool", content="3", tool="f", call_id="c")
    assert message_from({"role": "user", "content": ""}, "here") == Message(role="user")
    written = {"function": {"name": "f", "arguments": '{"a": 1}'}}  # as OpenAI's service has it
    made = message_from({"role": "assistant", "content": None, "tool_calls": [written]}, "here")
    assert made == Message(role="assistant", tool_calls=(ToolCall(name="f", arguments={"a": 1}),))


def test_openings_and_replies_survive_the_pipe():
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    opening = Opening(messages=(FULL, Message(role="user", content="x")), tools=(tool,))
    assert opening_of_json(opening_json(opening)) == opening
    reply = Reply(messages=(Message(role="user"),), reward=-0.1, num_tool_errors=2, parts={"a": 1.0})
    assert reply_of_json(reply_json(reply)) == reply
    assert {one.name for one in dataclasses.fields(Reply)} == reply_json(reply).keys()


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"done": True, "after": 7}, "after=7 beside done or an opening"),
        ({"opening": Opening(token_ids=(1,)), "after": 0}, "after=0 beside done or an opening"),
        ({"opening": Opening(token_ids=(1,)), "is_again": True}, "several of done, messages, is_again and an opening"),
        ({"messages": (Message(role="user"),), "is_again": True}, "several of done, messages, is_again"),
        ({"is_again": 1}, "is_again=1; expected True or False"),
        ({"is_again": True, "after": -1}, "after=-1; expected the number of a turn"),
        ({"opening": Opening(token_ids=(1,)), "stop": ("x",)}, "stop beside an opening, which has its own"),
        ({}, "neither done nor a message"),
    ],
)
def test_a_reply_says_one_thing_about_what_comes_next(fields, why):
    with pytest.raises(DataError, match=why):
        reply_from(Reply(**fields), "an environment")


def test_a_reply_that_branches_crosses_a_pipe():
    for fields in ({"is_again": True, "after": 2}, {"opening": Opening(messages=(Message(role="user", content="a"),))}):
        reply = reply_from(Reply(**fields), "an environment")
        assert reply_of_json(json.loads(json.dumps(reply_json(reply)))) == reply
