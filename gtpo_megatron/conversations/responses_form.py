"""OpenAI's Responses: what a request asks, in the words of chat completions, and the policy's turn as the answer."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from gtpo_megatron.conversations.chat_form import (
    IGNORED,
    WHERE,
    ChatRequest,
    chat_request_from,
    check_known,
    is_cut,
    named_events,
    spoken_turn,
    usage_of,
)
from gtpo_megatron.conversations.messages import Message
from gtpo_megatron.errors import DataError
from gtpo_megatron.untrusted.fields import Fields
from gtpo_megatron.untrusted.text import shown

_IGNORED = IGNORED | {"max_output_tokens", "max_tool_calls", "include", "truncation", "prompt_cache_options"}
_AS_CHAT = ("model", "stream", "tool_choice", "parallel_tool_calls")
_READ = frozenset({"input", "instructions", "tools", "text", *_AS_CHAT})


def responses_request_from(value: object) -> ChatRequest:
    """A request from its JSON.

    Raises:
        DataError: it is none, or asks for what an episode cannot have.
    """
    body = Fields({key: one for key, one in Fields(value, WHERE).raw.items() if one is not None}, WHERE)
    check_known(body.raw, _READ | _IGNORED)
    instructions = body.get("instructions", str, "")
    text = body.fields("text")
    chat: dict[str, Any] = {
        "messages": [
            *([{"role": "system", "content": instructions}] if instructions else []),
            *_messages_from(body.raw.get("input")),
        ],
        "tools": [_tool(one) for one in body.get("tools", list, [])],
        "response_format": text.raw.get("format"),
    }
    return chat_request_from(chat | {key: body.raw[key] for key in _AS_CHAT if key in body.raw})


def _messages_from(given: object) -> list[dict[str, Any]]:
    """The messages of an input; all that the policy has said in a turn is one."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise DataError(f"input={shown(given)}: expected a text or a list of items")
    messages: list[dict[str, Any]] = []
    for item in given:
        fields = Fields(item, "an item of input").raw
        kind = fields.get("type", "message")
        if kind == "function_call_output":
            result = {"role": "tool", "tool_call_id": fields.get("call_id"), "content": fields.get("output")}
            messages.append(result)
        elif kind == "message" and fields.get("role") != "assistant":
            messages.append({"role": fields.get("role"), "content": fields.get("content")})
        elif kind in ("message", "function_call", "reasoning"):
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": [], "tool_calls": [], "reasoning_content": ""})
            _add_to_turn(messages[-1], kind, fields)
        else:
            raise DataError(f"an item of input has type={shown(kind)}: the policy would not read it")
    return messages


def _add_to_turn(turn: dict[str, Any], kind: str, item: Mapping[str, Any]) -> None:
    content = item.get("content") or []
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    if kind == "message":
        turn["content"] += parts
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        turn["tool_calls"].append({"id": item.get("call_id"), "function": function})
    else:
        turn["reasoning_content"] += "".join(str(one.get("text", "")) for one in parts if isinstance(one, Mapping))


def _tool(given: object) -> dict[str, Any]:
    """A tool as chat completions write it."""
    tool = Fields(given, "a tool").raw
    if tool.get("type") != "function":
        raise DataError(f"tools: one has type={shown(tool.get('type'))}; only functions can be called here")
    known = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
    return {"type": "function", "function": known}


def responses_answer(turn: Message, *, request: ChatRequest, number: int) -> dict[str, Any] | str:
    """The answer to a request; events as text if it is streamed.

    Args:
        turn: turn of the policy.
        request: the request.
        number: number of the answer, which its ids contain.
    """
    items = _items(spoken_turn(turn, request.asked.opening.stop), number)
    usage = usage_of(turn)
    response: dict[str, Any] = {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if is_cut(turn) else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut(turn) else None,
        "error": None,
        "instructions": None,
        "model": request.model,
        "output": items,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "metadata": {},
        "temperature": None,
        "top_p": None,
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }
    return _events(response) if request.is_streamed else response


def _items(spoken: Mapping[str, Any], number: int) -> list[dict[str, Any]]:
    """A turn as items: its reasoning, its text, its calls."""
    items: list[dict[str, Any]] = []
    if reasoning := spoken.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{number}", "summary": [], "content": content})
    if spoken["content"] is not None:
        part = {"type": "output_text", "text": spoken["content"], "annotations": [], "logprobs": []}
        message = {"type": "message", "id": f"msg_{number}", "role": "assistant", "content": [part]}
        items.append(message | {key: spoken[key] for key in ("malformed_calls",) if key in spoken})
    for place, call in enumerate(spoken.get("tool_calls", ())):
        items.append(
            {"type": "function_call", "id": f"fc_{number}_{place}", "call_id": call["id"], **call["function"]},
        )
    return [{**item, "status": "completed"} for item in items]


def _events(response: Mapping[str, Any]) -> str:
    """The answer as server-sent events, all at once, since an episode's turns are sampled whole."""
    begun = {**response, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    events: list[dict[str, Any]] = [
        {"type": f"response.{what}", "response": begun} for what in ("created", "in_progress")
    ]
    for index, item in enumerate(response["output"]):
        empty: dict[str, Any] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        at = {"item_id": item["id"], "output_index": index}
        added = {"item": {**item, **empty, "status": "in_progress"}, "output_index": index}
        events.append({"type": "response.output_item.added", **added})
        events += [{**event, **at} for event in _contents(item)]
        events.append({"type": "response.output_item.done", "item": item, "output_index": index})
    events.append({"type": f"response.{response['status']}", "response": response})
    return named_events([{**event, "sequence_number": number} for number, event in enumerate(events)])


def _contents(item: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
    """The events of what an item contains."""
    if item["type"] == "function_call":
        what, arguments = "response.function_call_arguments", item["arguments"]
        done = {"type": f"{what}.done", "arguments": arguments, "name": item["name"]}
        return [{"type": f"{what}.delta", "delta": arguments}, done]
    part = item["content"][0]
    is_reasoning = part["type"] == "reasoning_text"
    what = "response.reasoning_text" if is_reasoning else "response.output_text"
    more: dict[str, Any] = {} if is_reasoning else {"logprobs": []}
    text = [
        {"type": f"{what}.delta", "content_index": 0, "delta": part["text"], **more},
        {"type": f"{what}.done", "content_index": 0, "text": part["text"], **more},
    ]
    if is_reasoning:
        return text
    added = {"type": "response.content_part.added", "content_index": 0, "part": {**part, "text": ""}}
    return [added, *text, {"type": "response.content_part.done", "content_index": 0, "part": part}]
