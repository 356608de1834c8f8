"""OpenAI's chat completions: what a request asks, and the policy's turn as the answer to it."""

import json
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from gtpo_megatron.conversations.exchange import Asked, before_stop, told_text
from gtpo_megatron.conversations.messages import Message, Opening, TurnStats
from gtpo_megatron.conversations.openai_form import KEYS, message_from, opening_from
from gtpo_megatron.errors import DataError
from gtpo_megatron.untrusted.fields import Fields
from gtpo_megatron.untrusted.text import shown

WHERE = "the request"

_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "max_completion_tokens", "min_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "length_penalty"),
)
_SERVICE = (
    *("model", "user", "store", "metadata", "service_tier", "prompt_cache_key", "prompt_cache_retention"),
    *("safety_identifier", "reasoning_effort", "reasoning", "include_reasoning", "thinking", "verbosity", "usage"),
    *("request_id", "priority", "cache_salt", "spaces_between_special_tokens"),
)

IGNORED = frozenset({*_SAMPLING, *_SERVICE})
"""Keys of a request that change nothing: the run's settings say how is sampled, and what is trained on is that."""

_ONLY: Mapping[str, tuple[Sequence[object], str]] = {
    "best_of": ((1,), "a turn is what was sampled"),
    "logprobs": ((False,), "the run keeps log-probs itself"),
    "logit_bias": (({},), "the policy is trained as it is"),
    "modalities": ((["text"],), "the policy writes text"),
    "function_call": (("auto", "none"), "tools have taken its place"),
    "skip_special_tokens": ((True,), "a turn is text without special tokens"),
    "add_generation_prompt": ((True,), "the policy begins its turn"),
}
"""Keys that must be left out or have one of these values, and why."""

_NOT_ENFORCED = frozenset({"tool_choice", "response_format", "parallel_tool_calls"})
"""Keys that are taken and not enforced: what is sampled is the policy's own distribution."""

_TEXT_FORMAT = {"type": "text"}

_READ = frozenset({"messages", "tools", "stop", "stream", "stream_options", "n"})

MAX_ANSWERS = 128
"""Most answers to a request, as OpenAI has it."""

_CONTENTS = ("refusal", "audio", "images", "function_call")
"""Keys of a message with content that the policy would not read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRequest:
    """A request for a turn of the policy.

    Attributes:
        asked: all messages, and the tools.
        model: name of the model that the client asks for.
        is_streamed: whether the client wants the answer as events.
        wants_usage: whether the client wants an event with the numbers of tokens.
    """

    asked: Asked
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
        _check_key(key, given)
    messages = body.raw.get("messages")
    if not isinstance(messages, list) or not messages:
        raise DataError(f"messages={shown(messages)}: expected a list of at least one")
    read, unread = _messages_from(messages)
    if read[-1].role == "assistant":
        raise DataError("the last message is one of the assistant; expected one that the policy answers")
    tools = body.raw.get("tools", ())
    opening = Opening(messages=read, tools=tools, stop=stop_from(body.raw.get("stop"), WHERE))
    return ChatRequest(
        asked=Asked(
            opening=opening_from(opening, "the agent"),
            unread=unread,
            is_enforced=_is_enforced(body.raw),
            num_answers=_num_answers(body.get("n", int, 1)),
        ),
        model=body.get("model", str, "policy"),
        is_streamed=body.get("stream", bool, False),
        wants_usage=body.fields("stream_options").get("include_usage", bool, False),
    )


def _num_answers(given: int) -> int:
    if not 1 <= given <= MAX_ANSWERS:
        raise DataError(f"n={given}: expected a number of answers from 1 to {MAX_ANSWERS}")
    return given


def _check_key(key: str, given: object) -> None:
    """Raises DataError of a key that asks for what an episode cannot have."""
    if key in _ONLY:
        values, why = _ONLY[key]
        if given not in values:
            raise DataError(f"{key}={shown(given)}: only {json.dumps(values[0])} is possible here, since {why}")
    else:
        check_known({key: given}, _READ | IGNORED | _NOT_ENFORCED)


def check_known(body: Mapping[str, Any], known: Set[str]) -> None:
    """Raises DataError of a key that is not known, unless it is empty: then it asks for nothing."""
    for key, given in body.items():
        if given and key not in known:
            raise DataError(f"{key}={shown(given)}: this endpoint does not know it")


def _is_enforced(body: Mapping[str, Any]) -> bool:
    """Whether the keys that are not enforced ask for no more than what is done anyway."""
    if body.get("response_format", _TEXT_FORMAT) != _TEXT_FORMAT:
        return False
    if not body.get("tools"):
        return body.get("tool_choice", "none") in ("none", "auto")
    return body.get("tool_choice", "auto") == "auto" and bool(body.get("parallel_tool_calls", True))


def stop_from(value: object, where: str) -> tuple[str, ...]:
    """Texts that end a turn, given as one or as several; empty ones end nothing.

    Raises:
        DataError: they are no texts.
    """
    texts = [value] if isinstance(value, str) or value is None else value
    if not isinstance(texts, list) or not all(isinstance(one, str | None) for one in texts):
        raise DataError(f"{where}: stop={shown(value)}, expected a text or a list of texts")
    return tuple(one for one in texts if one)


def chat_answer(*turns: Message, request: ChatRequest, number: int) -> dict[str, Any] | str:
    """The answer to a request; events as text if it is streamed.

    Args:
        turns: turns of the policy, as many as were asked for.
        request: the request.
        number: number of the answer, which its id contains.
    """
    if request.is_streamed:
        return _events(turns, request, number=number)
    choices: list[dict[str, Any]] = []
    for index, turn in enumerate(turns):
        spoken = spoken_turn(turn, request.asked.opening.stop)
        choices.append({"index": index, "message": spoken, "finish_reason": _finish_reason(turn), "logprobs": None})
    return _completion("chat.completion", number, request) | {"choices": choices, "usage": usage_of(*turns)}


def _events(turns: Sequence[Message], request: ChatRequest, *, number: int) -> str:
    """The answer as server-sent events: of each turn what is said, then each call, then the end.

    All of them come at once, since an episode's turns are sampled whole.
    """
    head = _completion("chat.completion.chunk", number, request)
    events: list[dict[str, Any]] = []
    for index, turn in enumerate(turns):
        spoken = spoken_turn(turn, request.asked.opening.stop)
        deltas: list[dict[str, Any]] = [{key: one for key, one in spoken.items() if key != "tool_calls"}]
        deltas += [{"tool_calls": [{"index": place, **one}]} for place, one in enumerate(spoken.get("tool_calls", ()))]
        reasons = [*(None for _ in deltas), _finish_reason(turn)]
        events += [
            head | {"choices": [{"index": index, "delta": delta, "finish_reason": reason, "logprobs": None}]}
            for delta, reason in zip([*deltas, {}], reasons, strict=True)
        ]
    if request.wants_usage:
        events.append(head | {"choices": [], "usage": usage_of(*turns)})
    return "".join(f"data: {text}\n\n" for text in (*map(json.dumps, events), "[DONE]"))


def named_events(events: Sequence[Mapping[str, Any]]) -> str:
    """Server-sent events with their types as names, as Responses and Messages have them."""
    return "".join(f"event: {one['type']}\ndata: {json.dumps(one)}\n\n" for one in events)


def error_body(message: str, *, kind: str) -> dict[str, Any]:
    """An error as clients of OpenAI and of Anthropic read it."""
    return {"type": "error", "error": {"message": message, "type": kind, "param": None, "code": None}}


def _messages_from(values: Sequence[object]) -> tuple[tuple[Message, ...], dict[int, str]]:
    """All messages; of those of the assistant that cannot be read, why, by place: they may be turns of the policy."""
    read: list[Message] = []
    unread: dict[int, str] = {}
    for place, value in enumerate(values):
        try:
            read.append(_message_from(value))
        except DataError as problem:
            if not isinstance(value, Mapping) or value.get("role") != "assistant":
                raise
            read.append(Message(role="assistant"))
            unread[place] = str(problem)
    return tuple(read), unread


def _message_from(value: object) -> Message:
    if not isinstance(value, Mapping):
        return message_from(value, "the agent")
    if lost := [key for key in _CONTENTS if value.get(key)]:
        raise DataError(f"a message has {lost[0]}={shown(value[lost[0]])}, which the policy would not read")
    # clients repeat answers with keys of their own, and such as have nothing in them
    known = {key: one for key, one in value.items() if key in KEYS and (one or key in ("role", "content"))}
    return message_from(known, "the agent")


def _completion(kind: str, number: int, request: ChatRequest) -> dict[str, Any]:
    return {"id": f"chatcmpl-{number}", "object": kind, "created": int(time.time()), "model": request.model}


def spoken_turn(turn: Message, stop: Sequence[str]) -> dict[str, Any]:
    """A turn of the policy as OpenAI writes it; reasoning and calls that cannot be read are additions to that.

    A turn with such a call has all of its text as content.
    """
    calls = [
        {
            "id": call.call_id,
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)},
        }
        for call in turn.tool_calls
    ]
    content, reasoning = told_text(turn, stop), before_stop(turn.reasoning, stop)
    return {
        "role": "assistant",
        "content": content if content or not calls else None,
        **({"reasoning_content": reasoning} if reasoning else {}),
        **({"malformed_calls": list(turn.malformed_calls)} if turn.malformed_calls else {}),
        **({"tool_calls": calls} if calls else {}),
    }


def is_cut(turn: Message) -> bool:
    """Whether a limit ended the turn."""
    return turn.sampled is not None and turn.sampled.is_cut


def _finish_reason(turn: Message) -> str:
    if is_cut(turn):
        return "length"
    return "tool_calls" if turn.tool_calls else "stop"


def usage_of(*turns: Message) -> dict[str, int]:
    """How many tokens turns of one prompt have, and the prompt, as OpenAI writes it."""
    sampled = [turn.sampled or TurnStats() for turn in turns]
    prompt, completion = sampled[0].num_prompt_tokens, sum(one.num_tokens for one in sampled)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
