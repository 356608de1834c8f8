"""Anthropic's Messages: what a request asks, in the words of chat completions, and the policy's turn as the answer."""

import json
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
from gtpo_megatron.conversations.exchange import stop_in
from gtpo_megatron.conversations.messages import Message
from gtpo_megatron.errors import DataError
from gtpo_megatron.untrusted.fields import Fields
from gtpo_megatron.untrusted.text import shown

SIGNATURE = "policy"
"""Of every block of thinking: clients send one without a signature back as words of the user."""

_IGNORED = IGNORED | {"cache_control", "context_management", "inference_geo", "speed", "betas"}
_AS_CHAT = ("model", "stream")
_READ = frozenset(
    {"messages", "system", "tools", "tool_choice", "stop_sequences", "output_format", "output_config", *_AS_CHAT}
)


def messages_request_from(value: object) -> ChatRequest:
    """A request from its JSON.

    Raises:
        DataError: it is none, or asks for what an episode cannot have.
    """
    body = Fields({key: one for key, one in Fields(value, WHERE).raw.items() if one is not None}, WHERE)
    check_known(body.raw, _READ | _IGNORED)
    system, choice = body.raw.get("system"), body.fields("tool_choice")
    chat: dict[str, Any] = {
        "messages": [
            *([{"role": "system", "content": system}] if system else []),
            *_messages_from(body.raw.get("messages")),
        ],
        "tools": [_tool(one) for one in body.get("tools", list, [])],
        "stop": body.raw.get("stop_sequences"),
        "tool_choice": choice.raw.get("type"),
        "parallel_tool_calls": not choice.raw.get("disable_parallel_tool_use"),
        "response_format": body.raw.get("output_format") or body.fields("output_config").raw.get("format"),
    }
    return chat_request_from(chat | {key: body.raw[key] for key in _AS_CHAT if key in body.raw})


def _messages_from(given: object) -> list[dict[str, Any]]:
    """The messages of a request; results of tools are messages of their own."""
    if not isinstance(given, list):
        raise DataError(f"messages={shown(given)}: expected a list of at least one")
    messages: list[dict[str, Any]] = []
    for one in given:
        fields = Fields(one, "a message").raw
        role, content = fields.get("role"), fields.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list):
            raise DataError(f"a message has content={shown(content)}; expected a text or a list of blocks")
        if role != "assistant":
            messages += _foreign(role, blocks)
            continue
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": [], "tool_calls": [], "reasoning_content": ""})
        for block in blocks:
            _add_to_turn(messages[-1], block)
    return messages


def _foreign(role: object, blocks: Sequence[Any]) -> list[dict[str, Any]]:
    """A message that is not the assistant's: its results of tools, and its text between them."""
    messages: list[dict[str, Any]] = []
    for block in blocks:
        if isinstance(block, Mapping) and block.get("type") == "tool_result":
            call_id, content = block.get("tool_use_id"), block.get("content")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
        elif messages and messages[-1]["role"] == role:
            messages[-1]["content"].append(block)
        else:
            messages.append({"role": role, "content": [block]})
    return messages or [{"role": role, "content": ""}]


def _add_to_turn(turn: dict[str, Any], block: Any) -> None:
    kind = block.get("type") if isinstance(block, Mapping) else None
    if kind == "tool_use":
        function = {"name": block.get("name"), "arguments": block.get("input")}
        turn["tool_calls"].append({"id": block.get("id"), "function": function})
    elif kind == "thinking":
        turn["reasoning_content"] += str(block.get("thinking", ""))
    elif kind != "redacted_thinking":
        turn["content"].append(block)


def _tool(given: object) -> dict[str, Any]:
    """A tool as chat completions write it."""
    tool = Fields(given, "a tool").raw
    if tool.get("type", "custom") != "custom":
        raise DataError(
            f"tools: one has type={shown(tool['type'])}; only tools with an input_schema can be called here"
        )
    names = {"name": "name", "description": "description", "input_schema": "parameters"}
    return {"type": "function", "function": {names[key]: tool[key] for key in names if tool.get(key) is not None}}


def messages_answer(turn: Message, *, request: ChatRequest, number: int) -> dict[str, Any] | str:
    """The answer to a request; events as text if it is streamed.

    Args:
        turn: turn of the policy.
        request: the request.
        number: number of the answer, which its id contains.
    """
    stop, usage = request.asked.opening.stop, usage_of(turn)
    spoken = spoken_turn(turn, stop)
    ended_by = stop_in(turn.content, stop) or stop_in(turn.reasoning, stop)
    reason = "stop_sequence" if ended_by else "end_turn"
    message: dict[str, Any] = {
        "id": f"msg_{number}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": _blocks(turn, spoken),
        "stop_reason": "max_tokens" if is_cut(turn) else "tool_use" if turn.tool_calls else reason,
        "stop_sequence": ended_by or None,
        "usage": {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]},
    }
    message |= {key: spoken[key] for key in ("malformed_calls",) if key in spoken}
    return _events(message) if request.is_streamed else message


def _blocks(turn: Message, spoken: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A turn as blocks: its reasoning, its text, its calls."""
    blocks: list[dict[str, Any]] = []
    if reasoning := spoken.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": reasoning, "signature": SIGNATURE})
    if spoken["content"]:
        blocks.append({"type": "text", "text": spoken["content"]})
    calls = [{"id": one.call_id, "name": one.name, "input": dict(one.arguments)} for one in turn.tool_calls]
    return [*blocks, *({"type": "tool_use", **one} for one in calls)]


def _events(message: Mapping[str, Any]) -> str:
    """The answer as server-sent events, all at once, since an episode's turns are sampled whole."""
    begun: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
    events: list[dict[str, Any]] = [{"type": "message_start", "message": {**message, **begun}}]
    for index, block in enumerate(message["content"]):
        empty: dict[str, Any]
        match block["type"]:
            case "thinking":
                signed = {"type": "signature_delta", "signature": block["signature"]}
                empty = {"thinking": "", "signature": ""}
                deltas = [{"type": "thinking_delta", "thinking": block["thinking"]}, signed]
            case "text":
                empty, deltas = {"text": ""}, [{"type": "text_delta", "text": block["text"]}]
            case _:
                written = json.dumps(block["input"], ensure_ascii=False)
                empty, deltas = {"input": {}}, [{"type": "input_json_delta", "partial_json": written}]
        events.append({"type": "content_block_start", "index": index, "content_block": {**block, **empty}})
        events += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
        events.append({"type": "content_block_stop", "index": index})
    ended = {key: message[key] for key in ("stop_reason", "stop_sequence")}
    events += [{"type": "message_delta", "delta": ended, "usage": message["usage"]}, {"type": "message_stop"}]
    return named_events(events)
