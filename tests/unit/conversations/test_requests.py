"""What a request may say: keys, repeated turns of the policy, streams, and the same request again."""

import json

import openai
import pytest

from gtpo_megatron.conversations.exchange import Ended
from gtpo_megatron.conversations.messages import Message, ToolCall
from tests.unit.conversations.test_chat_endpoint import HELLO, TOOL, ask, until, waiting_connection

OTHER_TOOL = {"type": "function", "function": {"name": "sub", "parameters": {"type": "object", "properties": {}}}}
CALLS = (ToolCall(name="add", arguments={"a": 1}), ToolCall(name="sub", arguments={}))


def answered(endpoint, exchange, threads, body, turn, doing):
    """The answer to a request, what the policy read for it, and what the agent does next."""
    reply = threads.submit(ask, endpoint, exchange, body)
    until(lambda: reply.done() or doing.done())
    assert not reply.done(), reply.result()
    following = exchange.answer(turn)
    status, found = reply.result(60)
    assert status == 200
    return found, doing.result().added, following


def said(text):
    return Message(role="assistant", content=text)


def refusal(endpoint, exchange, body):
    status, found = ask(endpoint, exchange, body)
    assert status == 400
    assert "\n" not in found["error"]["message"]
    return found["error"]["message"]


# ------------------------------------------------------------------------------------------------------------- keys
TAKEN = [
    *({key: None} for key in ("n", "stop", "tools", "tool_choice", "response_format", "logit_bias", "top_logprobs")),
    *({"stop": value} for value in ("", [], [""], "x", ["x", "y"], [None])),
    *({"n": 1}, {"best_of": 1}, {"logprobs": False}, {"top_logprobs": 0}, {"logit_bias": {}}, {"modalities": ["text"]}),
    *({"tool_choice": value} for value in ("auto", "none")),
    {"response_format": {"type": "text"}},
    *({"function_call": value} for value in ("auto", "none", None)),
    *(
        {key: False}
        for key in ("echo", "ignore_eos", "include_stop_str_in_output", "use_beam_search", "continue_final")
    ),
    *({key: []} for key in ("stop_token_ids", "functions", "documents", "bad_words")),
    *({key: {}} for key in ("chat_template_kwargs", "mm_processor_kwargs", "vllm_xargs")),
    *({"min_tokens": value} for value in (0, 5)),
    *({"skip_special_tokens": True}, {"add_generation_prompt": True}, {"spaces_between_special_tokens": True}),
    *({"temperature": 0}, {"top_p": 0.5}, {"seed": 3}, {"max_tokens": 5}, {"max_completion_tokens": 5}),
    *({"presence_penalty": 1}, {"frequency_penalty": 1}, {"repetition_penalty": 1.1}, {"top_k": 5}, {"min_p": 0.1}),
    *({"user": "me"}, {"store": True}, {"metadata": {"a": "b"}}, {"service_tier": "auto"}, {"verbosity": "low"}),
    *(
        {"prompt_cache_key": "k"},
        {"safety_identifier": "s"},
        {"reasoning_effort": "high"},
        {"usage": {"include": True}},
    ),
    *({"stream": False}, {"stream_options": None}, {"model": "any"}, {"request_id": "r"}, {"priority": 1}),
]


@pytest.mark.parametrize("body", TAKEN, ids=json.dumps)
def test_keys_that_change_nothing_are_taken(endpoint, exchange, threads, body):
    answered(endpoint, exchange, threads, {"messages": HELLO, **body}, said("hi"), exchange.first)
    assert (exchange.num_unenforced, exchange.num_refused) == (0, 0)


NAMED = {"type": "function", "function": {"name": "add"}}
NOT_ENFORCED = [
    *({"tool_choice": value, "tools": [TOOL]} for value in ("required", "none", NAMED)),
    {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}, "tools": [TOOL]},
    {"tool_choice": "required"},
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}},
    {"parallel_tool_calls": False, "tools": [TOOL]},
]


@pytest.mark.parametrize("body", NOT_ENFORCED, ids=json.dumps)
def test_what_is_not_enforced_is_taken_and_counted(endpoint, exchange, threads, body):
    body = {"messages": HELLO, **body}
    found, _, _ = answered(endpoint, exchange, threads, body, said("as it is"), exchange.first)
    assert found["choices"][0]["message"]["content"] == "as it is"
    assert ask(endpoint, exchange, body)[0] == 200, "a retry, which is no other turn"
    assert (exchange.num_unenforced, exchange.num_refused) == (1, 0)


@pytest.mark.parametrize(
    "body",
    [
        *({"n": 0}, {"n": 129}, {"n": True}, {"best_of": 2}, {"logprobs": True}, {"top_logprobs": 5}),
        *({"logit_bias": {"1": 5}}, {"echo": True}),
        *({"modalities": ["audio"]}, {"functions": [{"name": "add"}]}, {"function_call": {"name": "add"}}),
        *({"stop_token_ids": [5]}, {"skip_special_tokens": False}, {"add_generation_prompt": False}),
        *({"chat_template_kwargs": {"a": 1}}, {"structured_outputs": {"json": {}}}, {"web_search_options": {"a": 1}}),
        *({"stop": 5}, {"stop": [5]}),
    ],
    ids=json.dumps,
)
def test_what_an_episode_cannot_have_is_refused_by_its_key(endpoint, exchange, body):
    found = refusal(endpoint, exchange, {"messages": HELLO, **body})
    assert found.split("=")[0].split(" is ")[0].endswith(next(iter(body)))
    assert exchange.refusal


def test_texts_that_end_the_turn_are_its_own_and_not_in_the_answer(endpoint, exchange, threads):
    body = {"messages": HELLO, "stop": ["Observation:", "", "</code>"]}
    turn = Message(role="assistant", content="x = 1</code>", reasoning="so")
    found, opening, following = answered(endpoint, exchange, threads, body, turn, exchange.first)
    assert opening.stop == ("Observation:", "</code>")
    message = found["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("x = 1", "so")
    assert found["choices"][0]["finish_reason"] == "stop"
    more = [*HELLO, {"role": "assistant", "content": "x = 1"}, *HELLO]
    assert answered(endpoint, exchange, threads, {"messages": more}, said("a</code>"), following)[1].stop == ()
    ids = {"token_ids": [7], "sampling_params": {"stop": "\n"}}
    other = endpoint.open()
    reply = threads.submit(ask, endpoint, other, ids, path="/inference/v1/generate")
    assert other.first.result(60).added.stop == ("\n",)
    other.answer(Message(role="assistant"))
    assert reply.result(60)[0] == 200


# --------------------------------------------------------------------------------------------- history and its turns
OWN_KEYS = {
    **{"provider_specific_fields": {"a": 1}, "reasoning": "r", "reasoning_details": [{"text": "t"}], "id": "msg_1"},
    **{"thinking_blocks": [{"thinking": "t"}], "status": "completed", "cache_control": {"type": "ephemeral"}},
    **{"extra_content": {"a": 1}, "annotations": [{"url": "u"}], "refusal": "no", "audio": {"id": "a"}, "phase": "x"},
    **{"function_call": {"name": "add", "arguments": "{}"}, "finish_reason": "stop", "reasoning_content": "other"},
}


def test_unknown_keys_of_a_turn_of_the_policy_are_ignored(endpoint, exchange, threads):
    _, _, following = answered(endpoint, exchange, threads, {"messages": HELLO}, said("hi"), exchange.first)
    history = HELLO
    for key, value in OWN_KEYS.items():
        history = [*history, {"role": "assistant", "content": "hi", key: value}, *HELLO]
        _, added, following = answered(endpoint, exchange, threads, {"messages": history}, said("hi"), following)
        assert [one.content for one in added.messages] == ["hello"]
    assert exchange.num_refused == 0


def test_those_of_other_messages_are_ignored_but_for_content(endpoint, exchange, threads):
    system = {"role": "system", "content": "Be brief.", "cache_control": {"type": "ephemeral"}, "status": "completed"}
    few = [{"role": "user", "content": "a", "id": "m"}, {"role": "assistant", "content": "b", "phase": "x"}]
    body = {"messages": [system, *few, *HELLO]}
    _, opening, _ = answered(endpoint, exchange, threads, body, said("hi"), exchange.first)
    assert [one.content for one in opening.messages] == ["Be brief.", "a", "b", "hello"]


@pytest.mark.parametrize("role", ["user", "assistant"])
@pytest.mark.parametrize("key", ["refusal", "audio", "images", "function_call"])
def test_content_that_the_policy_would_not_read_is_refused(endpoint, exchange, role, key):
    body = {"messages": [{"role": role, "content": "a", key: ["x"]}, *HELLO]}
    assert refusal(endpoint, exchange, body) == f"a message has {key}=['x'], which the policy would not read"


REPEATED = {
    "left out": [],
    "other words": [{"role": "assistant", "content": "Calling tools: [{'id': 'call00001'}]"}],
    "no content": [{"role": "assistant"}],
    "parts of other kinds": [{"role": "assistant", "content": [{"type": "tool_use", "id": "x"}]}],
    "arguments that are no JSON": [
        {"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "add", "arguments": "{"}}]}
    ],
    "arguments with a default": [
        {"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "add", "arguments": '{"a":1,"b":0}'}}]}
    ],
}


@pytest.mark.parametrize("repeated", REPEATED.values(), ids=REPEATED)
def test_a_turn_of_the_policy_is_known_by_its_place(endpoint, exchange, threads, repeated):
    """Also the names of the tools whose results follow are known without it."""
    body = {"messages": HELLO, "tools": [TOOL, OTHER_TOOL]}
    turn = Message(role="assistant", tool_calls=CALLS)
    _, _, following = answered(endpoint, exchange, threads, body, turn, exchange.first)
    results = [{"role": "tool", "tool_call_id": f"call0000{one}", "content": f"r{one}"} for one in (1, 2)]
    history = [*HELLO, *repeated, *results]
    _, added, following = answered(endpoint, exchange, threads, {"messages": history}, said("2"), following)
    assert [(one.tool, one.content) for one in added.messages] == [("add", "r1"), ("sub", "r2")]
    more = [*history, *repeated, *HELLO]
    _, added, _ = answered(endpoint, exchange, threads, {"messages": more}, said("3"), following)
    assert [one.content for one in added.messages] == ["hello"]


def said_dict(text):
    return {"role": "assistant", "content": text}


FEW = [
    {"role": "system", "content": "Be brief. " * 20},
    *HELLO,
    {"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "add", "arguments": '{"a": 1}'}}]},
    {"role": "tool", "tool_call_id": "x", "content": "1"},
]


def changed(place, **keys):
    return [*FEW[:place], {**FEW[place], **keys}, *FEW[place + 1 :]]


NEW = {"role": "user", "content": "new"}
OTHER_CALL = [{"id": "x", "function": {"name": "add", "arguments": '{"a": 2}'}}]


@pytest.mark.parametrize(
    "messages",
    [
        [*changed(0, content="Be long."), NEW],
        [*changed(1, role="system"), NEW],
        [*changed(2, tool_calls=OTHER_CALL), NEW],
        [*changed(3, content="2"), NEW],
        [*FEW[1:], NEW],
        FEW[:2],
        [*FEW[:1], NEW],
        [*FEW, said_dict("hi"), said_dict("that nobody sampled"), NEW],
    ],
)
def test_a_history_that_is_rewritten_begins_a_new_sequence(endpoint, exchange, threads, messages):
    _, _, following = answered(endpoint, exchange, threads, {"messages": FEW}, said("hi"), exchange.first)
    _, added, following = answered(endpoint, exchange, threads, {"messages": messages}, said("you"), following)
    assert [(one.role, one.content) for one in added.messages] == [
        (one["role"], one.get("content", "")) for one in messages
    ]
    first = [*FEW, said_dict("hi"), *HELLO]
    _, added, following = answered(endpoint, exchange, threads, {"messages": first}, said("3"), following)
    assert [one.content for one in added.messages] == ["hello"], "the first one goes on"
    again = [*messages, said_dict("you"), *HELLO]
    _, added, _ = answered(endpoint, exchange, threads, {"messages": again}, said("4"), following)
    assert [one.content for one in added.messages] == ["hello"], "and so does the new one"
    assert exchange.num_refused == 0


def test_what_cannot_be_read_begins_no_sequence(endpoint, exchange, threads):
    answered(endpoint, exchange, threads, {"messages": FEW}, said("hi"), exchange.first)
    found = refusal(endpoint, exchange, {"messages": [*changed(2, audio={"id": 5}), NEW]})
    assert found == "a message has audio={'id': 5}, which the policy would not read"


def step_of(endpoint, exchange, threads, body, turn, doing):
    """What the policy is to answer, and what the agent does next."""
    reply = threads.submit(ask, endpoint, exchange, body)
    until(lambda: reply.done() or doing.done())
    assert not reply.done(), reply.result()
    following = exchange.answer(turn)
    assert reply.result(60)[0] == 200
    return doing.result(), following


def test_a_tree_of_requests(endpoint, exchange, threads):
    """Turn 0; 1 and 2 after it, 2 by another question; 3 after 1; 4 in the place of 2; 5 after 4; a sub-agent."""

    def step(*messages, turn, following, **more):
        body = {"messages": list(messages), **more}
        return step_of(endpoint, exchange, threads, body, said(turn), following)

    begin = [*HELLO, said_dict("t0")]
    sub = [{"role": "system", "content": "A helper."}, *HELLO]
    first, following = step(*HELLO, turn="t0", following=exchange.first)
    assert (first.after, first.is_again) == (None, False)
    found = []
    for messages, turn, more in (
        ([*begin, user("a")], "t1", {}),
        ([*begin, user("b")], "t2", {}),
        ([*begin, user("a"), said_dict("t1"), user("c")], "t3", {}),
        ([*begin, user("b")], "t4", {"stop": "x"}),
        ([*begin, user("b"), said_dict("t4"), user("d")], "t5", {}),
        ([*begin, user("b"), said_dict("t2"), user("d")], "t6", {}),
        (sub, "s0", {}),
        ([*sub, said_dict("s0"), user("e")], "s1", {}),
        (HELLO, "t00", {}),
    ):
        one, following = step(*messages, turn=turn, following=following, **more)
        found.append((one.after, one.is_again, [message.content for message in one.added.messages]))
    assert found == [
        (0, False, ["a"]),
        (0, False, ["b"]),
        (1, False, ["c"]),
        (2, True, []),
        (4, False, ["d"]),
        (2, False, ["d"]),
        (None, False, ["A helper.", "hello"]),
        (7, False, ["e"]),
        (0, True, []),
    ]


def user(text):
    return {"role": "user", "content": text}


def test_several_answers_are_turns_of_their_own(endpoint, exchange, threads):
    body = {"messages": HELLO, "n": 3}
    reply = threads.submit(ask, endpoint, exchange, body)
    doing, steps = exchange.first, []
    for turn in ("a", "b", "c"):
        steps.append(doing.result(60))
        doing = exchange.answer(said(turn))
    found = reply.result(60)[1]
    assert [(one["index"], one["message"]["content"]) for one in found["choices"]] == [(0, "a"), (1, "b"), (2, "c")]
    assert [(one.after, one.is_again) for one in steps] == [(None, False), (0, True), (1, True)]
    on, _ = step_of(endpoint, exchange, threads, {"messages": [*HELLO, said_dict("b"), *HELLO]}, said("d"), doing)
    assert (on.after, on.is_again) == (1, False)


def test_requests_of_one_moment_are_answered_one_after_the_other(endpoint, exchange, threads):
    """Also the same one: each of its clients is there, so each gets an answer of its own."""
    replies = [threads.submit(ask, endpoint, exchange, {"messages": [user(text)]}) for text in ("a", "b", "a", "a")]
    until(lambda: len(exchange._queue) == 3)
    doing, found = exchange.first, []
    for number in range(4):
        step = doing.result(60)
        found.append(step.added.messages[0].content if step.added.messages else "again")
        doing = exchange.answer(said(f"t{number}"))
    contents = [one.result(60)[1]["choices"][0]["message"]["content"] for one in replies]
    assert sorted(contents) == ["t0", "t1", "t2", "t3"]
    assert sorted(found) == ["a", "again", "again", "b"]
    assert exchange.num_refused == 0


def test_tools_may_be_missing_or_in_another_order_later(endpoint, exchange, threads):
    body = {"messages": HELLO, "tools": [TOOL, OTHER_TOOL]}
    _, opening, following = answered(endpoint, exchange, threads, body, said("hi"), exchange.first)
    assert opening.tools == (TOOL, OTHER_TOOL)
    history = HELLO
    for tools in ({}, {"tools": []}, {"tools": [OTHER_TOOL, TOOL]}, {"tools": None}):
        history = [*history, *HELLO]
        body = {"messages": history, **tools}
        following = answered(endpoint, exchange, threads, body, said("hi"), following)[2]
    other = {"type": "function", "function": {"name": "sub", "description": "Subtracts."}}
    body = {"messages": [*history, *HELLO], "tools": [other]}
    step, _ = step_of(endpoint, exchange, threads, body, said("hi"), following)
    assert (step.after, step.added.tools) == (None, (other,)), "they are in the prompt"


# ------------------------------------------------------------------------------------------------- calls and streams
def test_two_calls_with_one_id_have_ids_of_their_own(endpoint, exchange, threads):
    calls = tuple(ToolCall(name=name, arguments={}, call_id="one") for name in ("a", "b"))
    calls += (ToolCall(name="c", arguments={}, call_id="call00001"), ToolCall(name="d", arguments={}))
    turn = Message(role="assistant", tool_calls=calls)
    found, _, following = answered(endpoint, exchange, threads, {"messages": HELLO}, turn, exchange.first)
    spoken = found["choices"][0]["message"]
    ids = [one["id"] for one in spoken["tool_calls"]]
    assert ids == ["one", "call00002", "call00001", "call00003"]
    results = [{"role": "tool", "tool_call_id": one, "content": f"r{one}"} for one in ids]
    body = {"messages": [*HELLO, spoken, *results]}
    _, added, _ = answered(endpoint, exchange, threads, body, said("done"), following)
    assert [(one.tool, one.content) for one in added.messages] == [
        *(("a", "rone"), ("b", "rcall00002"), ("c", "rcall00001"), ("d", "rcall00003")),
    ]


def test_results_of_calls_with_one_id_are_those_of_the_calls_in_order(endpoint, exchange, threads):
    """Of an opening that the agent has written."""
    calls = [{"id": "one", "function": {"name": name, "arguments": "{}"}} for name in ("a", "b")]
    results = [{"role": "tool", "tool_call_id": "one", "content": one} for one in ("ra", "rb")]
    body = {"messages": [*HELLO, {"role": "assistant", "tool_calls": calls}, *results]}
    _, opening, _ = answered(endpoint, exchange, threads, body, said("done"), exchange.first)
    assert [(one.tool, one.content) for one in opening.messages[2:]] == [("a", "ra"), ("b", "rb")]


def streamed(endpoint, exchange, threads, turn):
    client = openai.OpenAI(base_url=endpoint.url, api_key=exchange.key)

    def create():
        options = {"include_usage": True}
        return list(
            client.chat.completions.create(model="m", messages=HELLO, stream=True, stream_options=options, stop="!")
        )

    chunks = threads.submit(create)
    exchange.first.result(60)
    exchange.answer(turn)
    return chunks.result(60)


def test_a_stream_has_the_text_then_an_event_a_call_then_the_end(endpoint, exchange, threads):
    turn = Message(role="assistant", content="I call! x", reasoning="hm", tool_calls=CALLS)
    *chunks, usage = streamed(endpoint, exchange, threads, turn)
    choices = [one.choices[0] for one in chunks]
    assert [one.finish_reason for one in choices] == [None, None, None, "tool_calls"]
    first, *calls, last = (one.delta for one in choices)
    assert (first.role, first.content, first.reasoning_content, first.tool_calls) == ("assistant", "I call", "hm", None)
    assert [[(call.index, call.id, call.function.name) for call in one.tool_calls] for one in calls] == [
        [(0, "call00001", "add")],
        [(1, "call00002", "sub")],
    ]
    assert [one.tool_calls[0].function.arguments for one in calls] == ['{"a": 1}', "{}"]
    assert (last.content, last.tool_calls, usage.choices, usage.usage.total_tokens) == (None, None, [], 0)


def test_a_turn_without_calls_is_streamed_as_text_and_its_end(endpoint, exchange, threads):
    chunks = streamed(endpoint, exchange, threads, said("hi"))
    assert [one.choices[0].delta.content for one in chunks[:-1]] == ["hi", None]


def test_a_turn_with_a_call_that_cannot_be_read_is_given_back_as_text(endpoint, exchange, threads):
    raw = "I call <tool_call>{</tool_call> x"
    fields = {"content": "I call  x", "malformed_calls": ("call 1: no JSON",), "raw_text": raw}
    turn = Message(role="assistant", **fields)
    found, _, following = answered(endpoint, exchange, threads, {"messages": HELLO}, turn, exchange.first)
    spoken = found["choices"][0]["message"]
    assert (spoken["content"], spoken["malformed_calls"]) == (raw, ["call 1: no JSON"])
    assert found["choices"][0]["finish_reason"] == "stop"
    history = [*HELLO, spoken, *HELLO]
    following = answered(endpoint, exchange, threads, {"messages": history}, turn, following)[2]
    added = answered(endpoint, exchange, threads, {"messages": [*history, *HELLO]}, turn, following)[1]
    assert [one.content for one in added.messages] == ["hello"], "the second such turn is left out"
    assert exchange.num_refused == 0


# -------------------------------------------------------------------------------------------------- the same again
def test_the_same_request_is_answered_twice_and_then_anew(endpoint, exchange, threads):
    first = {"messages": HELLO, "temperature": 0.1}
    _, _, following = answered(endpoint, exchange, threads, first, said("hi"), exchange.first)
    again = {"messages": HELLO, "temperature": 0.9, "stream": False}
    assert ask(endpoint, exchange, again)[1]["choices"][0]["message"]["content"] == "hi"
    for turn in ("other", "third"):
        step, following = step_of(endpoint, exchange, threads, again, said(turn), following)
        assert (step.after, step.is_again) == (0 if turn == "other" else 1, True)
    more = {"messages": [*HELLO, said_dict("other"), *HELLO]}
    step, _ = step_of(endpoint, exchange, threads, more, said("you"), following)
    assert (step.after, exchange.num_refused) == (1, 0), "by the words of the turn, since all have one place"
    assert ask(endpoint, exchange, more)[0] == 200, "every request may be repeated once"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_answers_to_clients_that_had_gone_do_not_count(endpoint, exchange, threads, is_streamed):
    """OpenAI's client asks up to three times where nothing came."""
    for attempt in range(3):
        before = exchange._answer
        connection = waiting_connection(endpoint, exchange, stream=is_streamed)
        if attempt == 0:
            exchange.first.result(60)
        else:
            until(lambda before=before: exchange._answer is not before)
        if attempt < 2:
            connection.close()
    exchange.answer(said("hi"))
    assert connection.getresponse().status == 200
    assert len(exchange._turns) == 1


def test_a_client_that_goes_before_its_answer_may_ask_again_each_time(endpoint, exchange, threads):
    gone = waiting_connection(endpoint, exchange)
    exchange.first.result(60)
    gone.close()
    following = exchange.answer(said("hi"))
    until(lambda: exchange._turns[0].is_lost)
    step, following = step_of(endpoint, exchange, threads, {"messages": [user("else")]}, said("x"), following)
    for _ in range(2):
        assert ask(endpoint, exchange, {"messages": HELLO})[1]["choices"][0]["message"]["content"] == "hi"
        exchange._turns[0].is_lost = True
    exchange._turns[0].is_lost = False
    step, _ = step_of(endpoint, exchange, threads, {"messages": HELLO}, said("another"), following)
    assert (step.after, step.is_again) == (0, True)


def test_answers_that_are_lost_of_several_are_given_before_others_are_sampled(endpoint, exchange, threads):
    connection = waiting_connection(endpoint, exchange, n=4)
    exchange.first.result(60)
    following = exchange.answer(said("0"))
    following.result(60)
    connection.close()
    following = exchange.answer(said("1"))
    until(lambda: exchange._turns[1].is_lost)
    assert not following.done(), "nothing is sampled for nobody"
    reply = threads.submit(ask, endpoint, exchange, {"messages": HELLO, "n": 3})
    step = following.result(60)
    exchange.answer(said("2"))
    assert (step.after, step.is_again) == (1, True)
    assert [one["message"]["content"] for one in reply.result(60)[1]["choices"]] == ["0", "1", "2"]


# ------------------------------------------------------------------------------------------------- of several parents
def test_results_go_on_from_the_turn_that_has_their_calls(endpoint, exchange, threads):
    """Two turns that say nothing but calls; Messages and Responses, too, name a result by its call alone."""
    body = {"messages": HELLO, "n": 2, "tools": [TOOL]}
    reply = threads.submit(ask, endpoint, exchange, body)
    doing = exchange.first
    for number in (1, 2):
        doing.result(60)
        call = ToolCall(name="add", arguments={"a": number})
        doing = exchange.answer(Message(role="assistant", tool_calls=(call,)))
    choices = [one["message"] for one in reply.result(60)[1]["choices"]]
    for number, told in enumerate((choices[0], {"role": "assistant", "content": ""}), start=1):
        result = {"role": "tool", "tool_call_id": choices[0]["tool_calls"][0]["id"], "content": str(number)}
        body = {"messages": [*HELLO, told, result]}
        step, doing = step_of(endpoint, exchange, threads, body, said("done"), doing)
        assert (step.after, step.added.messages[0].tool) == (0, "add")


UNREAD = Message(role="assistant", content="a", malformed_calls=("no JSON",), raw_text="a <call>{")


@pytest.mark.parametrize(
    ("turns", "more", "repeated"),
    [
        ((said("x = 1</code>"), said("x = 2</code>")), {"stop": ["</code>"]}, said_dict("x = 1")),
        ((UNREAD, said("a")), {}, said_dict("a <call>{")),
        ((said("a \n"), said("b")), {}, said_dict("a")),
        (
            tuple(Message(role="assistant", content="a", reasoning=one) for one in "pq"),
            {},
            said_dict("a") | {"reasoning_content": "p"},
        ),
    ],
    ids=["stop", "a call that cannot be read", "white space", "reasoning"],
)
def test_a_turn_is_known_as_it_was_told(endpoint, exchange, threads, turns, more, repeated):
    reply = threads.submit(ask, endpoint, exchange, {"messages": HELLO, "n": 2, **more})
    doing = exchange.first
    for turn in turns:
        doing.result(60)
        doing = exchange.answer(turn)
    assert reply.result(60)[0] == 200
    body = {"messages": [*HELLO, repeated, *HELLO], **more}
    assert step_of(endpoint, exchange, threads, body, said("on"), doing)[0].after == 0


def test_other_words_in_the_place_of_a_turn_that_was_gone_on_from_are_read(endpoint, exchange, threads):
    """A history that was compacted into a message of the assistant."""
    _, _, following = answered(endpoint, exchange, threads, {"messages": HELLO}, said("a0"), exchange.first)
    more = [*HELLO, said_dict("reworded"), *HELLO]
    step, following = step_of(endpoint, exchange, threads, {"messages": more}, said("a1"), following)
    assert step.after == 0
    compacted = [*HELLO, said_dict("All so far: X=7"), user("go on")]
    step, _ = step_of(endpoint, exchange, threads, {"messages": compacted}, said("a2"), following)
    assert (step.after, [one.content for one in step.added.messages]) == (None, ["hello", "All so far: X=7", "go on"])


def test_a_turn_is_tried_again_behind_one_that_was_reworded(endpoint, exchange, threads):
    """Also once the episode has gone on from it."""
    _, _, following = answered(endpoint, exchange, threads, {"messages": HELLO}, said("a0"), exchange.first)
    second = [*HELLO, said_dict("reworded"), user("b")]
    _, following = step_of(endpoint, exchange, threads, {"messages": second}, said("a1"), following)
    third = [*second, said_dict("a1"), user("c")]
    _, following = step_of(endpoint, exchange, threads, {"messages": third}, said("a2"), following)
    step, _ = step_of(endpoint, exchange, threads, {"messages": second}, said("a3"), following)
    assert (step.after, step.is_again) == (1, True)


# ------------------------------------------------------------------------------------------------- of several at once
def test_one_that_is_given_up_beside_an_answer_is_no_last_request(endpoint, exchange, threads):
    first = threads.submit(ask, endpoint, exchange, {"messages": [user("a")]})
    exchange.first.result(60)
    other = waiting_connection(endpoint, exchange, messages=[user("b")])
    until(lambda: len(exchange._queue) == 1)
    following = exchange.answer(said("won"))
    following.result(60)
    other.close()
    assert first.result(60)[0] == 200
    exchange.end(Ended(1.0))
    assert not exchange.was_left


def test_a_refusal_is_mended_by_a_request_that_comes_after_it(endpoint, exchange, threads):
    first = threads.submit(ask, endpoint, exchange, {"messages": [user("a")]})
    exchange.first.result(60)
    second = threads.submit(ask, endpoint, exchange, {"messages": [user("b")]})
    until(lambda: len(exchange._queue) == 1)
    refusal(endpoint, exchange, {"messages": [user("c")], "logprobs": True})
    following = exchange.answer(said("1"))
    following.result(60)
    following = exchange.answer(said("2"))
    assert (first.result(60)[0], second.result(60)[0]) == (200, 200)
    assert exchange.refusal.startswith("logprobs")
    step_of(endpoint, exchange, threads, {"messages": [user("d")]}, said("3"), following)
    assert exchange.refusal == ""


# --------------------------------------------------------------------------------------------------------- addresses
def test_models_are_known_by_any_name_and_queries_mean_nothing(endpoint, exchange, threads):
    assert ask(endpoint, exchange, b"", method="GET", path="/v1/models?a=b")[1]["data"][0]["id"] == "policy"
    for name in ("policy", "org%2Fname", "org/name"):
        status, found = ask(endpoint, exchange, b"", method="GET", path=f"/v1/models/{name}")
        assert (status, found["object"], found["id"]) == (200, "model", name.replace("%2F", "/"))
    assert ask(endpoint, exchange, b"", method="GET", path="/v2/models/policy")[0] == 404
    reply = threads.submit(ask, endpoint, exchange, {"messages": HELLO}, path="/v1/chat/completions/?api-version=1")
    exchange.first.result(60)
    exchange.answer(said("hi"))
    assert reply.result(60)[0] == 200
