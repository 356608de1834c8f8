"""OpenAI's Responses and Anthropic's Messages, by their own clients and types."""

import copy
import json
from random import Random

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from gtpo_megatron.conversations.chat_form import chat_request_from
from gtpo_megatron.conversations.exchange import Exchange
from gtpo_megatron.conversations.messages import Message, ToolCall, TurnStats
from gtpo_megatron.conversations.messages_form import messages_request_from
from gtpo_megatron.conversations.responses_form import responses_request_from
from gtpo_megatron.errors import DataError
from tests.unit.conversations.test_chat_endpoint import HELLO, TOOL, ask, until

PARAMETERS = {"type": "object", "properties": {}}
SAMPLED = TurnStats(num_prompt_tokens=5, num_tokens=3)
CALLING = Message(
    role="assistant",
    content="I add.",
    reasoning="hm",
    tool_calls=(ToolCall(name="add", arguments={"a": "é"}), ToolCall(name="add", arguments={}, call_id="own")),
    sampled=SAMPLED,
)
RESULTS = (
    Message(role="tool", content="4", tool="add", call_id="call00001"),
    Message(role="tool", content="5", tool="add", call_id="own"),
    Message(role="user", content="And?"),
)


def answered(exchange, threads, request, turn, doing):
    """What a client's call returns, what the policy read for it, and what the agent does next."""
    reply = threads.submit(request)
    until(lambda: reply.done() or doing.done())
    if not doing.done():
        reply.result()  # raises what went wrong
    following = exchange.answer(turn)
    return reply.result(60), doing.result(0).added, following


def refused(endpoint, exchange, path, body):
    status, found = ask(endpoint, exchange, body, path=path)
    assert (status, found["type"], found["error"]["type"]) == (400, "error", "invalid_request_error")
    return found["error"]["message"]


# --------------------------------------------------------------------------------------------------------- Responses
OPENAI_TOOL = {"type": "function", "name": "add", "parameters": PARAMETERS, "strict": True}
RESPONSES = "/v1/responses"


@pytest.fixture
def responses(endpoint, exchange):
    return openai.OpenAI(base_url=endpoint.url, api_key=exchange.key).responses


def outputs(ids):
    return [
        {"type": "function_call_output", "call_id": id_, "output": text} for id_, text in zip(ids, "45", strict=True)
    ]


def test_a_conversation_by_responses(responses, exchange, threads):
    def create(given):
        return responses.create(
            model="mine", instructions="Be brief.", input=given, tools=[OPENAI_TOOL], store=False, max_output_tokens=9
        )

    first, opening, following = answered(exchange, threads, lambda: create("hello"), CALLING, exchange.first)
    assert opening.messages == (Message(role="system", content="Be brief."), Message(role="user", content="hello"))
    assert opening.tools == (TOOL,)
    Response.model_validate(first.to_dict())
    assert (first.model, first.status, first.usage.total_tokens, first.output_text) == (
        "mine",
        "completed",
        8,
        "I add.",
    )
    assert [one.type for one in first.output] == ["reasoning", "message", "function_call", "function_call"]
    assert first.output[0].content[0].text == "hm"
    calls = [(one.call_id, one.name, one.arguments) for one in first.output[2:]]
    assert calls == [("call00001", "add", '{"a": "é"}'), ("own", "add", "{}")]
    history = [*HELLO, *first.output, *outputs(["call00001", "own"]), {"role": "user", "content": "And?"}]
    cut = Message(role="assistant", content="long", sampled=TurnStats(is_cut=True))
    second, added, following = answered(exchange, threads, lambda: create(history), cut, following)
    assert added.messages == RESULTS
    assert (second.status, second.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    more = [*history, *second.output, {"type": "message", "role": "user", "content": parts}]
    third, added, _ = answered(exchange, threads, lambda: create(more), Message(role="assistant"), following)
    assert "".join(added.messages[0].content.split()) == "ab"
    assert third.output_text == ""
    assert exchange.num_unenforced == exchange.num_refused == 0


def test_responses_may_leave_turns_out_or_say_them_otherwise(responses, exchange, threads):
    def create(given):
        return responses.create(
            model="m", input=given, tool_choice="required", text={"format": {"type": "json_object"}}
        )

    _, _, following = answered(exchange, threads, lambda: create("hello"), CALLING, exchange.first)
    history = [*HELLO, *outputs(["call00001", "own"])]
    _, added, following = answered(exchange, threads, lambda: create(history), CALLING, following)
    assert added.messages == RESULTS[:2]
    history += [{"role": "assistant", "content": "I called tools."}, *HELLO]
    _, added, _ = answered(exchange, threads, lambda: create(history), CALLING, following)
    assert [one.content for one in added.messages] == ["hello"]
    assert (exchange.num_unenforced, exchange.num_refused) == (3, 0)


def test_events_of_responses_are_those_of_its_client(responses, exchange, threads):
    def stream():
        with responses.stream(model="m", input="hello") as events:
            found = list(events)
            return found, events.get_final_response()

    (events, final), _, _ = answered(exchange, threads, stream, CALLING, exchange.first)
    kinds = [one.type.removeprefix("response.") for one in events]
    item = ["output_item.added", "output_item.done"]
    text = ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
    call = ["function_call_arguments.delta", "function_call_arguments.done"]
    assert kinds == [
        *("created", "in_progress"),
        *(item[0], "reasoning_text.delta", "reasoning_text.done", item[1]),
        *(item[0], *text, item[1]),
        *(item[0], *call, item[1]),
        *(item[0], *call, item[1]),
        "completed",
    ]
    assert [one.sequence_number for one in events] == list(range(len(events)))
    assert (final.output_text, final.usage.total_tokens) == ("I add.", 8)
    assert [one.arguments for one in final.output[2:]] == ['{"a": "é"}', "{}"]


def test_events_of_responses_have_all_that_its_types_ask_for(endpoint, exchange, threads):
    def raw():
        client = openai.OpenAI(base_url=endpoint.url, api_key=exchange.key)
        with client.responses.with_streaming_response.create(model="m", input="hello", stream=True) as found:
            return found.read().decode()

    text, _, _ = answered(exchange, threads, raw, CALLING, exchange.first)
    blocks = [block.split("\n") for block in text.split("\n\n") if block]
    for name, data in blocks:
        event = TypeAdapter(ResponseStreamEvent).validate_python(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {event.type}"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"input": 5}, "input=5: expected a text or a list of items"),
        ({"input": []}, "messages=[]: expected a list of at least one"),
        ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id='resp_1': this endpoint does not"),
        ({"input": "a", "conversation": "c"}, "conversation='c': this endpoint does not know it"),
        ({"input": "a", "background": True}, "background=True: this endpoint does not know it"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools: one has type='web_search'; only functions"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "type='item_reference': the policy would not read it"),
        ({"input": [{"type": "local_shell_call_output", "id": "x"}]}, "type='local_shell_call_output'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "the policy reads text alone"),
        ({"input": [{"role": "assistant", "content": "x"}]}, "the last message is one of the assistant"),
        ({"input": outputs("ab")}, "tool_call_id='a', which no call before has"),
    ],
)
def test_what_responses_cannot_have_is_refused(endpoint, exchange, body, said):
    assert said in refused(endpoint, exchange, RESPONSES, body)


# ---------------------------------------------------------------------------------------------------------- Messages
ANTHROPIC_TOOL = {"name": "add", "input_schema": PARAMETERS, "cache_control": {"type": "ephemeral"}}
MESSAGES = "/v1/messages"
USER = {"role": "user", "content": "hello"}


@pytest.fixture
def messages(endpoint, exchange):
    """Its client writes /v1 itself, and the key in a header of its own."""
    anthropic = pytest.importorskip("anthropic")
    return anthropic.Anthropic(base_url=endpoint.url.removesuffix("/v1"), api_key=exchange.key).messages


def tool_results(ids):
    results = [
        {"type": "tool_result", "tool_use_id": ids[0], "content": "4"},
        {"type": "tool_result", "tool_use_id": ids[1], "content": [{"type": "text", "text": "5"}], "is_error": True},
    ]
    return {
        "role": "user",
        "content": [*results, {"type": "text", "text": "And?", "cache_control": {"type": "ephemeral"}}],
    }


def test_a_conversation_by_messages(messages, exchange, threads):
    def create(given, **more):
        return messages.create(
            model="mine",
            max_tokens=9,
            system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            messages=given,
            tools=[ANTHROPIC_TOOL],
            extra_body={"temperature": 0.5},
            **more,
        )

    first, opening, following = answered(exchange, threads, lambda: create([USER]), CALLING, exchange.first)
    assert opening.messages == (Message(role="system", content="Be brief."), Message(role="user", content="hello"))
    assert opening.tools == (TOOL,)
    assert (first.model, first.role, first.stop_reason, first.stop_sequence) == ("mine", "assistant", "tool_use", None)
    assert (first.usage.input_tokens, first.usage.output_tokens) == (5, 3)
    assert [one.type for one in first.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert (first.content[0].thinking, first.content[0].signature, first.content[1].text) == ("hm", "policy", "I add.")
    assert [(one.id, one.name, one.input) for one in first.content[2:]] == [
        ("call00001", "add", {"a": "é"}),
        ("own", "add", {}),
    ]
    history = [USER, {"role": "assistant", "content": first.content}, tool_results(["call00001", "own"])]
    stopped = Message(role="assistant", content="Say STOP!")
    second, added, following = answered(
        exchange, threads, lambda: create(history, stop_sequences=["!", "STOP"]), stopped, following
    )
    assert (added.messages, added.stop) == (RESULTS, ("!", "STOP"))
    assert (second.content[0].text, second.stop_reason, second.stop_sequence) == ("Say ", "stop_sequence", "STOP")
    more = [*history, {"role": "assistant", "content": "Say"}, USER]
    cut = Message(role="assistant", sampled=TurnStats(is_cut=True))
    third, added, following = answered(exchange, threads, lambda: create(more), cut, following)
    assert [one.content for one in added.messages] == ["hello"]
    assert (third.content, third.stop_reason) == ([], "max_tokens")
    left_out = [*more, USER]
    fourth, _, _ = answered(
        exchange, threads, lambda: create(left_out), Message(role="assistant", content="a"), following
    )
    assert (fourth.stop_reason, exchange.num_refused, exchange.num_unenforced) == ("end_turn", 0, 0)


@pytest.mark.parametrize(
    ("choice", "is_counted"),
    [
        ({"type": "auto"}, False),
        ({"type": "auto", "disable_parallel_tool_use": True}, True),
        ({"type": "any"}, True),
        ({"type": "none"}, True),
        ({"type": "tool", "name": "add"}, True),
    ],
)
def test_choices_of_tools_that_are_not_enforced_are_counted(messages, exchange, threads, choice, is_counted):
    def create():
        return messages.create(
            model="m",
            max_tokens=9,
            messages=[USER],
            tools=[ANTHROPIC_TOOL],
            tool_choice=choice,
            thinking={"type": "disabled"},
        )

    answered(exchange, threads, create, Message(role="assistant"), exchange.first)
    assert exchange.num_unenforced == is_counted


def test_events_of_messages_are_those_of_its_client(messages, exchange, threads):
    def stream():
        with messages.stream(model="m", max_tokens=9, messages=[USER]) as events:
            kinds = [one.type for one in events]
            return kinds, events.get_final_message()

    (kinds, final), _, _ = answered(exchange, threads, stream, CALLING, exchange.first)
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4
    assert [one.type for one in final.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert [one.input for one in final.content[2:]] == [{"a": "é"}, {}]
    assert (final.content[0].thinking, final.content[0].signature) == ("hm", "policy")
    assert (final.content[1].text, final.stop_reason) == ("I add.", "tool_use")
    assert (final.usage.input_tokens, final.usage.output_tokens) == (5, 3)


def test_events_of_messages_have_all_that_its_types_ask_for(messages, exchange, threads):
    types = pytest.importorskip("anthropic.types")

    def raw():
        with messages.with_streaming_response.create(model="m", max_tokens=9, messages=[USER], stream=True) as found:
            return found.read().decode()

    text, _, _ = answered(exchange, threads, raw, CALLING, exchange.first)
    for block in filter(None, text.split("\n\n")):
        name, data = block.split("\n")
        event = TypeAdapter(types.RawMessageStreamEvent).validate_python(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {event.type}"


def test_a_call_that_cannot_be_read_is_text_in_both(messages, responses, exchange, threads):
    broken = Message(role="assistant", content="", malformed_calls=("call 1: none",), raw_text="<tool_call>{")
    message, _, following = answered(
        exchange, threads, lambda: messages.create(model="m", max_tokens=9, messages=[USER]), broken, exchange.first
    )
    assert (message.content[0].text, message.malformed_calls) == ("<tool_call>{", ["call 1: none"])
    assert message.stop_reason == "end_turn"
    given = [*HELLO, {"role": "assistant", "content": "<tool_call>{"}, *HELLO]
    found, _, _ = answered(exchange, threads, lambda: responses.create(model="m", input=given), broken, following)
    assert (found.output_text, found.output[0].malformed_calls) == ("<tool_call>{", ["call 1: none"])


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "messages=None: expected a list of at least one"),
        ({"messages": []}, "messages=[]: expected a list of at least one"),
        ({"messages": [USER], "mcp_servers": [{"url": "u"}]}, "mcp_servers=[{'url': 'u'}]: this endpoint does not"),
        ({"messages": [USER], "tools": [{"type": "bash_20250124", "name": "bash"}]}, "one has type='bash_20250124'"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "the policy reads text alone"),
        ({"messages": [{"role": "user", "content": 5}]}, "content=5; expected a text or a list of blocks"),
        ({"messages": [USER, {"role": "assistant", "content": "{"}]}, "the last message is one of the assistant"),
        ({"messages": [tool_results("ab")]}, "tool_call_id='a', which no call before has"),
    ],
)
def test_what_messages_cannot_have_is_refused(endpoint, exchange, body, said):
    assert said in refused(endpoint, exchange, MESSAGES, body)


def test_errors_reach_anthropics_client_once(messages, exchange):
    anthropic = pytest.importorskip("anthropic")
    with pytest.raises(anthropic.BadRequestError, match="mcp_servers"):
        messages.create(model="m", max_tokens=9, messages=[USER], extra_body={"mcp_servers": [1]})
    assert exchange.num_refused == 1


# ----------------------------------------------------------------------------------------------------- damaged bodies
CALL = {"id": "x", "type": "function", "function": {"name": "add", "arguments": "{}"}}
BODIES = {
    chat_request_from: {
        "messages": [
            *({"role": "system", "content": [{"type": "text", "text": "a"}]}, *HELLO),
            {"role": "assistant", "content": "b", "tool_calls": [CALL], "reasoning_content": "c"},
            {"role": "tool", "tool_call_id": "x", "content": "d"},
        ],
        **{"tools": [TOOL], "stop": ["a"], "tool_choice": "auto", "response_format": {"type": "text"}, "stream": True},
        **{"stream_options": {"include_usage": True}, "model": "m", "n": 1},
    },
    responses_request_from: {
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "b"}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "c"}]},
            {"type": "function_call", "call_id": "x", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "x", "output": "4"},
        ],
        **{"tools": [OPENAI_TOOL], "instructions": "b", "text": {"format": {"type": "text"}}, "tool_choice": "auto"},
    },
    messages_request_from: {
        "messages": [
            *(USER, {"role": "user", "content": [{"type": "text", "text": "a"}]}),
            {
                "role": "assistant",
                "content": [
                    *({"type": "thinking", "thinking": "b"}, {"type": "text", "text": "c"}),
                    {"type": "tool_use", "id": "x", "name": "add", "input": {}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": "4"}]},
        ],
        **{"tools": [ANTHROPIC_TOOL], "system": [{"type": "text", "text": "b"}], "stop_sequences": ["a"]},
        **{"tool_choice": {"type": "auto"}, "output_config": {"format": {"type": "json_schema"}}},
    },
}
JUNK = [
    None,
    True,
    0,
    -1,
    1.5,
    "",
    "x",
    [],
    ["x"],
    [[]],
    {},
    {"type": 5},
    {"role": []},
    [{"type": "text"}],
    {"text": {}},
]


def damaged(value, random):
    """A copy with junk in one place of it."""
    if not value or not isinstance(value, dict | list) or random.random() < 0.15:
        return copy.deepcopy(random.choice(JUNK))
    found = value.copy()
    key = random.choice(list(value) if isinstance(value, dict) else range(len(value)))
    found[key] = damaged(value[key], random)
    return found


@pytest.mark.parametrize("read", BODIES, ids=lambda read: read.__name__)
def test_a_damaged_body_is_read_or_refused(read):
    """Whatever is wrong with it, nothing is an error of the endpoint."""
    random, problems = Random(54), []
    assert read(BODIES[read]).asked.opening.messages
    for _ in range(3000):
        try:
            asked = read(damaged(damaged(BODIES[read], random), random)).asked
            Exchange()._next_step(asked)
        except DataError as problem:
            problems.append(str(problem))
    assert 1000 < len(problems) < 2900
    assert not [one for one in problems if "\n" in one]
