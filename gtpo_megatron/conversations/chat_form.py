"""OpenAI's chat completions: what a request asks, and the policy's turn as the answer to it."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gtpo_megatron.conversations.messages import Message, Opening, TurnStats
from gtpo_megatron.conversations.openai_form import message_from, opening_from
from gtpo_megatron.errors import DataError
from gtpo_megatron.untrusted.fields import Fields
from gtpo_megatron.untrusted.text import shown

WHERE = "the request"

_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "max_completion_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
_SERVICE = (
    *("model", "user", "store", "metadata", "service_tier", "prompt_cache_key", "safety_identifier"),
    *("parallel_tool_calls", "reasoning_effort", "verbosity"),
)

IGNORED = frozenset({*_SAMPLING, *_SERVICE})
"""Keys of a request that change nothing: the run's settings say how is sampled, and what is trained on is that."""

_ONLY: Mapping[str, tuple[Sequence[object], str]] = {
    "n": ((1,), "an episode is one sequence"),
    "logprobs": ((False,), "the run keeps log-probs itself"),
    "stop": (([],), "rollout.sampling.stop_strings ends turns"),
    "logit_bias": (({},), "the policy is trained as it is"),
    "tool_choice": (("auto",), "the policy is trained as it is"),
    "response_format": (({"type": "text"},), "the policy is trained as it is"),
    "modalities": ((["text"],), "the policy writes text"),
}
"""Keys that must be left out or have one of these values, and why."""

_READ = frozenset({"messages", "tools", "stream", "stream_options"})


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRequest:
    """A request for a turn of the policy.

    Attributes:
        asked: all messages, and the tools.
        model: name of the model that the client asks for.
        is_streamed: whether the client wants the answer as events.
        wants_usage: whether the client wants an event with the numbers of tokens.
    """

    asked: Opening
    model: str
    is_streamed: bool
    wants_usage: bool


def chat_request_from(value: object) -> ChatRequest:
    """A request from its JSON.

    Raises:
        DataError: it is none, or asks for what an episode cannot have.
    """
    body = Fields({key: one for key, one in Fields(value, WHERE).raw.items() if one is not None}, WHERE)
    for key, given in body.raw.items():
        if key in _ONLY and given not in _ONLY[key][0]:
            values, why = _ONLY[key]
            raise DataError(f"{key}={shown(given)}: only {json.dumps(values[0])} is possible here, since {why}")
        if key not in _READ and key not in IGNORED and key not in _ONLY:
            raise DataError(f"{key}={shown(given)}: this endpoint does not know it")
    messages = body.raw.get("messages")
    if not isinstance(messages, list) or not messages:
        raise DataError(f"messages={shown(messages)}: expected a list of at least one")
    read = [_message_from(one) for one in messages]
    if read[-1].role == "assistant":
        raise DataError("the last message is one of the assistant; expected one that the policy answers")
    return ChatRequest(
        asked=opening_from(Opening(messages=_with_names(read), tools=body.raw.get("tools", ())), "the agent"),
        model=body.get("model", str, "policy"),
        is_streamed=body.get("stream", bool, False),
        wants_usage=body.fields("stream_options").get("include_usage", bool, False),
    )


def chat_answer(turn: Message, request: ChatRequest, *, number: int) -> dict[str, Any] | str:
    """The answer to a request; events as text if it is streamed.

    Args:
        turn: turn of the policy.
        request: the request.
        number: number of the answer, which its id contains.
    """
    if request.is_streamed:
        return _events(turn, request, number=number)
    return _completion("chat.completion", number, request) | {
        "choices": [
            {"index": 0, "message": _spoken(turn), "finish_reason": _finish_reason(turn), "logprobs": None},
        ],
        "usage": usage_of(turn),
    }


def _events(turn: Message, request: ChatRequest, *, number: int) -> str:
    """The answer as server-sent events: all of it in one, since an episode's turns are sampled whole."""
    head = _completion("chat.completion.chunk", number, request)
    delta = _spoken(turn)
    for place, call in enumerate(delta.get("tool_calls", ())):
        call["index"] = place
    whole = {"index": 0, "delta": delta, "finish_reason": _finish_reason(turn), "logprobs": None}
    events = [head | {"choices": [whole]}]
    if request.wants_usage:
        events.append(head | {"choices": [], "usage": usage_of(turn)})
    return "".join(f"data: {text}\n\n" for text in (*map(json.dumps, events), "[DONE]"))


def error_body(message: str, *, kind: str) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def _message_from(value: object) -> Message:
    if not isinstance(value, Mapping):
        return message_from(value, "the agent")
    # clients repeat answers with keys that have nothing in them, such as refusal and annotations
    plain = {key: one for key, one in value.items() if one or key in ("role", "content")}
    return message_from(plain, "the agent")


def _with_names(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages with the tools' names in results, where OpenAI has the calls' ids alone."""
    names: dict[str, str] = {}
    named: list[Message] = []
    for message in messages:
        names |= {call.call_id: call.name for call in message.tool_calls}
        if message.role != "tool" or message.tool:
            named.append(message)
        elif message.call_id in names:
            named.append(replace(message, tool=names[message.call_id]))
        else:
            raise DataError(f"a tool's result has tool_call_id={shown(message.call_id)}, which no call before has")
    return tuple(named)


def _completion(kind: str, number: int, request: ChatRequest) -> dict[str, Any]:
    return {"id": f"chatcmpl-{number}", "object": kind, "created": int(time.time()), "model": request.model}


def _spoken(turn: Message) -> dict[str, Any]:
    """A turn of the policy as OpenAI writes it; reasoning and calls that cannot be read are additions to that."""
    calls = [
        {
            "id": call.call_id,
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)},
        }
        for call in turn.tool_calls
    ]
    return {
        "role": "assistant",
        "content": turn.content if turn.content or not calls else None,
        **({"tool_calls": calls} if calls else {}),
        **({"reasoning_content": turn.reasoning} if turn.reasoning else {}),
        **({"malformed_calls": list(turn.malformed_calls)} if turn.malformed_calls else {}),
    }


def _finish_reason(turn: Message) -> str:
    if turn.sampled is not None and turn.sampled.is_cut:
        return "length"
    return "tool_calls" if turn.tool_calls else "stop"


def usage_of(turn: Message) -> dict[str, int]:
    """How many tokens a turn has, and its prompt, as OpenAI writes it."""
    sampled = turn.sampled or TurnStats()
    return {
        "prompt_tokens": sampled.num_prompt_tokens,
        "completion_tokens": sampled.num_tokens,
        "total_tokens": sampled.num_prompt_tokens + sampled.num_tokens,
    }
