"""The endpoint over HTTP, without workers: keys, requests of one moment, what is refused and how."""

import http.client
import io
import json
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import openai
import pytest

from gtpo_megatron.conversations import chat_endpoint
from gtpo_megatron.conversations.chat_endpoint import ChatEndpoint
from gtpo_megatron.conversations.chat_form import error_body
from gtpo_megatron.conversations.exchange import Ended, Exchange
from gtpo_megatron.conversations.messages import MAX_MESSAGE_BYTES, Message, ToolCall, TurnStats
from gtpo_megatron.errors import ConfigError

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
HELLO = [{"role": "user", "content": "hello"}]
OTHER = [{"role": "user", "content": "help"}, {"role": "user", "content": "me"}]


def ask(endpoint, exchange, body, *, key=None, path="/v1/chat/completions", method="POST", headers=None):
    """Status and JSON of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", endpoint.server_address[1], timeout=60)
    with_key = {"Authorization": f"Bearer {exchange.key if key is None else key}"}
    connection.request(method, path, body if isinstance(body, bytes) else json.dumps(body), with_key | (headers or {}))
    answer = connection.getresponse()
    assert answer.getheader("x-should-retry") == "false"
    found = json.loads(answer.read())
    connection.close()
    return answer.status, found


def asked(endpoint, exchange, threads, messages=HELLO, **more):
    """A request under way, which the exchange has."""
    return threads.submit(ask, endpoint, exchange, {"messages": messages, **more})


def test_a_conversation_with_calls_in_the_form_of_openai(endpoint, exchange, threads):
    client = openai.OpenAI(base_url=endpoint.url, api_key=exchange.key)

    def create(messages):
        return client.chat.completions.create(model="mine", messages=messages, tools=[TOOL], temperature=0.2, seed=3)

    first = threads.submit(create, HELLO)
    opening = exchange.first.result(60).added
    assert [one.content for one in opening.messages] == ["hello"]
    assert opening.tools == (TOOL,)
    calls = (ToolCall(name="add", arguments={"a": "é"}), ToolCall(name="add", arguments={}, call_id="own"))
    turn = Message(role="assistant", reasoning="hm", tool_calls=calls, malformed_calls=("call 3: none",))
    following = exchange.answer(Message(**{**_fields(turn), "sampled": TurnStats(num_prompt_tokens=5, num_tokens=3)}))
    answer = first.result(60)
    choice = answer.choices[0]
    assert (answer.model, choice.finish_reason, answer.usage.total_tokens) == ("mine", "tool_calls", 8)
    assert choice.message.content is None
    assert [(one.id, one.function.name, one.function.arguments) for one in choice.message.tool_calls] == [
        ("call00001", "add", '{"a": "é"}'),
        ("own", "add", "{}"),
    ]
    assert choice.message.reasoning_content == "hm"
    assert choice.message.malformed_calls == ["call 3: none"]
    results = [{"role": "tool", "tool_call_id": one.id, "content": "4"} for one in choice.message.tool_calls]
    second = threads.submit(create, [*HELLO, choice.message, *results])
    assert following.result(60).added.messages == (
        Message(role="tool", content="4", tool="add", call_id="call00001"),
        Message(role="tool", content="4", tool="add", call_id="own"),
    )
    exchange.answer(Message(role="assistant", content="long", sampled=TurnStats(is_cut=True)))
    assert second.result(60).choices[0].finish_reason == "length"


def _fields(message):
    return {name: getattr(message, name) for name in message.__slots__}


def test_a_wrong_key_reads_nothing(endpoint, exchange):
    for key in ("", "wrong", exchange.key[:-1], exchange.key + "x", "é"):
        for method, path in (("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("POST", "/")):
            status, body = ask(
                endpoint, exchange, {"messages": HELLO}, key=key.encode().decode("latin-1"), method=method, path=path
            )
            assert (status, body["error"]["type"]) == (401, "authentication_error")
    assert not exchange.first.done()


def test_a_stranger_s_body_is_dropped_while_it_is_read(endpoint, exchange, monkeypatch):
    monkeypatch.setattr(chat_endpoint, "parse_json", None)  # nor is it looked at
    largest = []
    read = io.BufferedReader.read

    class Counted(io.BufferedReader):
        def read(self, size=-1):
            largest.append(size)
            return read(self, size)

    make = socket.socket.makefile
    monkeypatch.setattr(
        chat_endpoint._Handler,
        "setup",
        lambda self, setup=chat_endpoint._Handler.setup: (
            setup(self),
            setattr(self, "rfile", Counted(make(self.connection, "rb", 0))),
        ),
    )
    status, found = ask(endpoint, exchange, b"[" * (MAX_MESSAGE_BYTES // 2), key="wrong")
    assert (status, found["error"]["message"]) == (401, chat_endpoint.UNKNOWN_KEY)
    assert largest
    assert max(largest) <= 1 << 16


def test_an_address_that_is_none_is_answered(endpoint, exchange):
    with socket.create_connection(endpoint.server_address[:2], timeout=60) as connection:
        connection.sendall(f"GET http://[x HTTP/1.1\r\nAuthorization: Bearer {exchange.key}\r\n\r\n".encode())
        assert connection.makefile("rb").readline().split()[1] == b"404"


def test_a_key_is_that_of_one_episode(endpoint, exchange, threads):
    other = endpoint.open()
    reply = asked(endpoint, other, threads)
    assert other.first.result(60).added.messages[0].content == "hello"
    assert not exchange.first.done()
    other.answer(Message(role="assistant", content="hi"))
    assert reply.result(60)[1]["choices"][0]["message"]["content"] == "hi"
    endpoint.forget(other)
    assert ask(endpoint, other, {"messages": HELLO})[0] == 401


def test_a_client_that_has_gone_is_replaced_by_the_same_request(endpoint, exchange, threads):
    waiting = waiting_connection(endpoint, exchange)
    exchange.first.result(60)
    waiting.close()
    again = asked(endpoint, exchange, threads)
    until(lambda: len(exchange._queue) == 0)
    exchange.answer(Message(role="assistant", content="hi"))
    assert again.result(60)[0] == 200


def test_a_request_whose_client_goes_while_others_are_answered_is_left_out(endpoint, exchange, threads):
    first = asked(endpoint, exchange, threads)
    exchange.first.result(60)
    waiting = waiting_connection(endpoint, exchange, messages=OTHER)
    until(lambda: len(exchange._queue) == 1)
    waiting.close()
    until(lambda: len(exchange._queue) == 0)
    following = exchange.answer(Message(role="assistant", content="hi"))
    assert first.result(60)[0] == 200
    assert (following.done(), exchange.num_refused) == (False, 0)


def test_a_client_that_was_gone_when_it_was_answered_may_ask_the_same_again(endpoint, exchange, threads):
    following = answered(endpoint, exchange, threads, HELLO, "hi", exchange.first)
    status, body = ask(endpoint, exchange, {"messages": HELLO, "stream": False})
    assert (status, body["choices"][0]["message"]["content"]) == (200, "hi")
    assert not following.done(), "it is no other turn"
    more = [*HELLO, {"role": "assistant", "content": "hi"}, *HELLO]
    second = asked(endpoint, exchange, threads, more)
    assert [one.content for one in following.result(60).added.messages] == ["hello"]
    exchange.answer(Message(role="assistant", content="again"))
    assert second.result(60)[1]["choices"][0]["message"]["content"] == "again"
    exchange.end(Ended(1.0))
    assert ask(endpoint, exchange, {"messages": more})[0] == 409


def test_requests_at_the_same_moment_are_all_answered(endpoint, exchange):
    with ThreadPoolExecutor(16) as many:
        start = threading.Barrier(16)

        def request(number):
            start.wait()
            return ask(endpoint, exchange, {"messages": [{"role": "user", "content": str(number)}]})

        replies = [many.submit(request, number) for number in range(16)]
        doing = exchange.first
        for _ in range(16):
            content = doing.result(60).added.messages[0].content
            doing = exchange.answer(Message(role="assistant", content=content))
        found = [one.result(60)[1]["choices"][0]["message"]["content"] for one in replies]
        assert found == [str(number) for number in range(16)]


def test_what_waits_for_others_is_refused_when_the_episode_ends(endpoint, exchange, threads):
    waiting = [asked(endpoint, exchange, threads, one) for one in (HELLO, OTHER)]
    exchange.first.result(60)
    until(lambda: len(exchange._queue) == 1)
    exchange.end(Ended(1.0))
    assert [one.result(60)[0] for one in waiting] == [409, 409]


def test_after_the_end_nothing_is_sampled(endpoint, exchange, threads):
    waiting = asked(endpoint, exchange, threads)
    exchange.first.result(60)
    exchange.end(Ended(1.0))  # the agent has returned, and left a request behind
    status, body = waiting.result(60)
    assert (status, body["error"]["message"]) == (409, "the episode has ended, by a limit or a failure")
    assert exchange.answer(Message(role="assistant", content="late")).result(0) == Ended(1.0)
    assert ask(endpoint, exchange, {"messages": HELLO})[0] == 409


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "the request: not valid JSON"),
        ([], "the request: is [], expected an object"),
        ({}, "messages=None: expected a list of at least one"),
        ({"messages": []}, "messages=[]: expected a list of at least one"),
        ({"messages": HELLO, "n": 0}, "n=0: expected a number of answers from 1 to 128"),
        ({"messages": HELLO, "best_of": 2}, "best_of=2: only 1 is possible here, since a turn is what was sampled"),
        ({"messages": HELLO, "stop": [5]}, "stop=[5], expected a text or a list of texts"),
        ({"messages": HELLO, "logprobs": True}, "the run keeps log-probs itself"),
        ({"messages": HELLO, "skip_special_tokens": False}, "only true is possible here"),
        ({"messages": HELLO, "documents": ["x"]}, "documents=['x']: this endpoint does not know it"),
        ({"messages": HELLO, "stream": "yes"}, "stream is 'yes', expected a boolean"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role='robot'; expected one of"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "the policy reads text alone"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "x"}]}, "the last message is one of the assistant"),
        (
            {"messages": [{"role": "tool", "tool_call_id": "x", "content": "4"}]},
            "tool_call_id='x', which no call before has",
        ),
        ({"messages": HELLO, "tools": [{"name": "add"}]}, "expected {'type': 'function'"),
    ],
)
def test_what_an_episode_cannot_have_is_refused_in_one_line(endpoint, exchange, body, said):
    status, found = ask(endpoint, exchange, body)
    assert status == 400
    assert said in found["error"]["message"]
    assert "\n" not in found["error"]["message"]
    assert not exchange.first.done()


def test_other_addresses_and_lengths_are_refused(endpoint, exchange):
    assert ask(endpoint, exchange, {}, path="/v1/embeddings")[0] == 404
    assert ask(endpoint, exchange, b"", method="GET", path="/v1/models")[1]["data"][0]["id"] == "policy"
    assert ask(endpoint, exchange, b" " * (MAX_MESSAGE_BYTES + 1))[0] == 413
    assert ask(endpoint, exchange, b"", headers={"Content-Length": "-5"}) == (
        400,
        error_body("Content-Length=-5: expected a number of bytes", kind="invalid_request_error"),
    )
    assert ask(endpoint, exchange, b"", headers={"Content-Length": "many"})[0] == 411


def test_every_refusal_is_noted_until_a_new_turn_mends_it(endpoint, exchange, threads):
    answered(endpoint, exchange, threads, HELLO, "hi", exchange.first)
    assert (exchange.num_refused, exchange.refusal) == (0, "")
    refused = [
        ask(endpoint, exchange, {"messages": HELLO, "best_of": 2}),
        ask(endpoint, exchange, b"{"),
        ask(endpoint, exchange, {}, path="/v1/embeddings"),
        ask(endpoint, exchange, b"", method="GET", path="/v1/other/policy"),
        ask(endpoint, exchange, b"", method="PUT"),
        ask(endpoint, exchange, b" " * (MAX_MESSAGE_BYTES + 1)),
        ask(endpoint, exchange, b"", headers={"Content-Length": "many"}),
        ask(endpoint, exchange, {"messages": OTHER, "logprobs": True}),
    ]
    assert [status for status, _ in refused] == [400, 400, 404, 404, 501, 413, 411, 400]
    assert ask(endpoint, exchange, {"messages": HELLO})[0] == 200, "the last answer again"
    assert (exchange.num_refused, exchange.refusal.partition(":")[0]) == (
        8,
        "best_of=2",
    ), "and no new turn"
    asked(endpoint, exchange, threads, [*HELLO, {"role": "assistant", "content": "hi"}, *HELLO])
    until(lambda: exchange.refusal == "")
    assert exchange.first_refusal.startswith("best_of=2")
    exchange.end(Ended(1.0))
    assert ask(endpoint, exchange, {"messages": HELLO})[0] == 409
    assert exchange.num_refused == 8, "nothing depends on those after the end"


def until(is_so):
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


def waiting_connection(endpoint, exchange, **more):
    """A request under way, whose answer nobody has read yet."""
    connection = http.client.HTTPConnection("127.0.0.1", endpoint.server_address[1], timeout=60)
    connection.request(
        "POST",
        "/v1/chat/completions",
        json.dumps({"messages": HELLO, **more}),
        {"Authorization": f"Bearer {exchange.key}"},
    )
    return connection


def test_a_request_that_never_ends_was_refused(endpoint, exchange, monkeypatch):
    monkeypatch.setattr(chat_endpoint._Handler, "timeout", 0.2)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer {exchange.key}\r\nContent-Length: 10\r\n\r\n{{"
    with socket.create_connection(endpoint.server_address) as connection:
        connection.sendall(head.encode())
        assert b" 408 " in connection.recv(1 << 16)
    assert exchange.refusal == "nothing came of the rest in 0.2 s"


def test_a_mistake_of_the_endpoint_is_no_silence(endpoint, exchange, threads, monkeypatch):
    def breaks(*_, **__):
        raise KeyError("ours")

    monkeypatch.setitem(chat_endpoint._FORMS, "/v1/chat/completions", (chat_endpoint.chat_request_from, breaks))
    reply = asked(endpoint, exchange, threads)
    exchange.first.result(60)
    exchange.answer(Message(role="assistant", content="hi"))
    assert reply.result(60)[0] == 500
    assert exchange.refusal == "KeyError: 'ours'"


def test_requests_without_a_key_are_counted_but_not_late_ones(endpoint, exchange):
    endpoint.take_unknown()
    over = endpoint.open()
    endpoint.forget(over)
    assert [ask(endpoint, exchange, {"messages": HELLO}, key=key)[0] for key in ("", "-", over.key)] == [401] * 3
    assert (endpoint.take_unknown(), endpoint.take_unknown(), exchange.num_refused) == (2, 0, 0)


def answered(endpoint, exchange, threads, messages, content, doing):
    reply = asked(endpoint, exchange, threads, messages)
    doing.result(60)
    following = exchange.answer(Message(role="assistant", content=content))
    assert reply.result(60)[0] == 200
    return following


def test_the_last_message_is_not_the_assistants(endpoint, exchange, threads):
    answered(endpoint, exchange, threads, HELLO, " hi there", exchange.first)
    status, body = ask(endpoint, exchange, {"messages": [*HELLO, {"role": "assistant", "content": "hi there"}]})
    assert status == 400
    assert "the last message is one of the assistant" in body["error"]["message"]


def test_what_clients_write_besides_is_read_too(endpoint, exchange, threads):
    opening = [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]},
        {"role": "user", "content": "a", "name": None},
        {"role": "assistant", "content": "b", "refusal": None, "annotations": []},
        {"role": "user", "content": "c"},
    ]
    reply = asked(endpoint, exchange, threads, opening, tool_choice="auto", top_p=None, max_tokens=5)
    assert exchange.first.result(60).added.messages[0] == Message(role="system", content="Be brief.\nBe kind.")
    exchange.answer(Message(role="assistant", content="d"))
    assert reply.result(60)[1]["choices"][0]["finish_reason"] == "stop"


def test_keys_are_long_and_never_the_same():
    keys = {Exchange().key for _ in range(100)}
    assert len(keys) == 100
    assert all(len(key) >= 43 for key in keys)


GENERATE = "/inference/v1/generate"


def generated(endpoint, exchange, threads, ids, said, doing):
    """An answer to tokens, and what the agent does next."""
    reply = threads.submit(ask, endpoint, exchange, {"token_ids": ids}, path=GENERATE)
    assert doing.result(60).added.token_ids == tuple(ids[-1:])
    sampled = TurnStats(num_prompt_tokens=len(ids), num_tokens=1, token_ids=said, logprobs=(-0.5,))
    following = exchange.answer(Message(role="assistant", sampled=sampled))
    return reply.result(60)[1], following


def test_tokens_go_on_from_what_was_sampled(endpoint, exchange, threads):
    first, following = generated(endpoint, exchange, threads, [7], (8,), exchange.first)
    assert first["choices"] == [
        {
            "index": 0,
            "token_ids": [8],
            "finish_reason": "stop",
            "stop_reason": None,
            "logprobs": {
                "content": [{"token": "token_id:8", "token_id": 8, "logprob": -0.5, "rank": None, "top_logprobs": []}]
            },
        }
    ]
    assert first["usage"]["total_tokens"] == 2
    assert "goes on with token ids" in ask(endpoint, exchange, {"messages": HELLO})[1]["error"]["message"]
    repeated = ask(endpoint, exchange, {"token_ids": [7]}, path=GENERATE)[1]
    assert repeated["choices"] == first["choices"]
    following = generated(endpoint, exchange, threads, [7, 8, 9], (1,), following)[1]
    for ids, after, is_again in (
        ([7, 8, 9, 1, 2], 1, False),
        ([7, 8, 9], 1, True),
        ([7, 8, 4, 4], 0, False),
        ([7, 5], None, False),
    ):
        reply = threads.submit(ask, endpoint, exchange, {"token_ids": ids}, path=GENERATE)
        step = following.result(60)
        assert (step.after, step.is_again) == (after, is_again)
        following = exchange.answer(Message(role="assistant", sampled=TurnStats(token_ids=(3,), logprobs=(-1.0,))))
        assert reply.result(60)[0] == 200


def test_messages_do_not_go_on_as_tokens(endpoint, exchange, threads):
    answered(endpoint, exchange, threads, HELLO, "hi", exchange.first)
    status, body = ask(endpoint, exchange, {"token_ids": [1]}, path=GENERATE)
    assert (status, body["error"]["message"]) == (400, "the episode began with messages; it goes on with messages")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "token_ids: got None, expected token ids"),
        ({"token_ids": []}, "expected at least one"),
        ({"token_ids": [1, -1]}, "got -1, expected token ids"),
        ({"token_ids": [True]}, "got True, expected token ids"),
        ({"token_ids": [1], "sampling_params": {"n": 2}}, "n=2: only 1 is possible here"),
        ({"token_ids": [1], "stream": True}, "stream=True: only False"),
        ({"token_ids": [1], "features": {}}, "features={}: this endpoint does not know it"),
    ],
)
def test_tokens_that_are_none_are_refused(endpoint, exchange, body, said):
    status, found = ask(endpoint, exchange, body, path=GENERATE)
    assert (status, said in found["error"]["message"]) == (400, True)


def test_an_endpoint_of_an_interface_listens_on_its_address_alone(monkeypatch, threads):
    """127.0.0.2 stands for the job's network: the loopback has it without being asked."""
    there = {
        "lo": [SimpleNamespace(family=socket.AF_INET, address="127.0.0.1")],
        "job0": [
            SimpleNamespace(family=socket.AF_INET6, address="::1"),
            SimpleNamespace(family=socket.AF_INET, address="127.0.0.2"),
            SimpleNamespace(family=socket.AF_INET, address="127.0.0.3"),
        ],
        "v6": [SimpleNamespace(family=socket.AF_INET6, address="::1")],
    }
    monkeypatch.setattr(chat_endpoint.psutil, "net_if_addrs", lambda: there)
    assert chat_endpoint.address_of("lo") == "127.0.0.1"
    for wrong in ("eth9", "v6"):
        with pytest.raises(ConfigError, match=f"endpoint_interface='{wrong}': .* no such interface .* has job0, lo$"):
            chat_endpoint.address_of(wrong)
    endpoint = ChatEndpoint(chat_endpoint.address_of("job0"))
    try:
        host, port = endpoint.server_address
        assert (host, endpoint.url) == ("127.0.0.2", f"http://127.0.0.2:{port}/v1")
        with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), timeout=5):
            pass
        exchange = endpoint.open()
        for key in ("", "wrong"):
            with pytest.raises(openai.AuthenticationError):
                openai.OpenAI(base_url=endpoint.url, api_key=key or "-", max_retries=0).models.list()
        client = openai.OpenAI(base_url=endpoint.url, api_key=exchange.key)
        asked = threads.submit(client.chat.completions.create, model="policy", messages=HELLO)
        exchange.first.result(60)
        exchange.answer(Message(role="assistant", content="hi"))
        assert asked.result(60).choices[0].message.content == "hi"
    finally:
        endpoint.shutdown()
        endpoint.server_close()


def test_proxies_are_kept_from_the_address_of_the_endpoint(monkeypatch):
    monkeypatch.setenv("no_proxy", "localhost,10.0.0.7,")
    monkeypatch.delenv("NO_PROXY", raising=False)
    chat_endpoint.keep_from_proxies("10.0.0.7")
    assert os.environ["no_proxy"] == "localhost,127.0.0.1,10.0.0.7"
    assert os.environ["NO_PROXY"] == "127.0.0.1,10.0.0.7"
