"""Chat messages of a row, with calls of tools and their results, and the tools that the row offers.

They become what chat templates read: arguments of calls and descriptions of functions are objects, also where the row
has them as text; and keys without a value are left out, with which Parquet fills every object of a column.
"""

from collections.abc import Mapping
from typing import Any

from gtpo_megatron.data.literal import literal
from gtpo_megatron.errors import DataError
from gtpo_megatron.untrusted.text import shown

Message = Mapping[str, Any]
"""One chat message: ``role`` and ``content``, both text; ``tool_calls`` of the assistant's; ``name`` and
``tool_call_id`` of a tool's result."""

TOOLS_COLUMN = "tools"
"""Column of the functions that the policy is told of."""


def chat_messages(prompt: object, column: str, place: str) -> tuple[Message, ...]:
    """A list of chat messages, the content of each a text or a list of parts; empty if it is something else.

    Raises:
        DataError: the assistant's turn is the last, or a call in one cannot be read.
    """
    if not isinstance(prompt, list | tuple) or not all(isinstance(message, Mapping) for message in prompt):
        return ()
    found = tuple(_message(message, column, place) for message in prompt)
    for message in found:
        texts = (message["role"],) if "tool_calls" in message else (message["role"], message["content"])
        if not all(isinstance(text, str) and text for text in texts):
            return ()
    if found and found[-1]["role"] == "assistant":
        raise DataError(f"{place}: {column} ends with the assistant's turn, which is the model's to write")
    return found


def tools_of(record: Mapping[str, object]) -> tuple[Mapping[str, Any], ...]:
    """The functions of the column ``tools``, as chat templates read them; none if it has anything else.

    A function may stand alone, or as OpenAI wraps it, or be a text of either.
    """
    listed = literal(record.get(TOOLS_COLUMN), "[")
    found = [_tool(literal(one, "{")) for one in listed] if isinstance(listed, list | tuple) else []
    return tuple(one for one in found if one is not None) if all(found) else ()


def _message(message: Mapping[str, object], column: str, place: str) -> dict[str, Any]:
    role = message.get("role")
    found: dict[str, Any] = {"role": role, "content": content_text(message.get("content"))}
    listed = literal(message.get("tool_calls"), "[") if role == "assistant" else None
    if listed:
        found["content"] = found["content"] or ""
        found["tool_calls"] = _calls(listed, column, place)
    if role == "tool":
        found |= {key: str(message[key]) for key in ("name", "tool_call_id") if message.get(key)}
    return found


def content_text(content: object) -> object:
    """The text of a message: its parts, a line each; ``<type>`` for one that is no text."""
    if not isinstance(content, list | tuple):
        return content
    if not all(isinstance(part, str | Mapping) for part in content):
        return content
    texts = (part if isinstance(part, str) else part.get("text") or f"<{part.get('type')}>" for part in content)
    return "\n".join(map(str, texts))


def _calls(listed: object, column: str, place: str) -> list[dict[str, Any]]:
    """Calls of tools with arguments by name; those may be a text of JSON, as OpenAI has them."""
    calls = []
    for call in listed if isinstance(listed, list | tuple) else [listed]:
        inner = (call.get("function") or call) if isinstance(call, Mapping) else None
        name = inner.get("name") if isinstance(inner, Mapping) else None
        arguments = literal(inner.get("arguments") or {}, "{") if isinstance(inner, Mapping) else None
        if not isinstance(call, Mapping) or not isinstance(name, str) or not isinstance(arguments, Mapping):
            raise DataError(
                f"{place}: {column} has the call of a tool {shown(call)}; expected "
                f"{{'function': {{'name': ..., 'arguments': {{...}}}}}}"
            )
        call_id = {"id": str(call["id"])} if call.get("id") else {}
        calls.append({**call_id, "type": "function", "function": {"name": name, "arguments": _filled(arguments)}})
    return calls


def _tool(value: object) -> Mapping[str, Any] | None:
    """A function as OpenAI wraps it; None if it is none."""
    if not isinstance(value, Mapping):
        return None
    inner = literal(value.get("function"), "{")
    if inner is None and isinstance(literal(value.get("parameters"), "{"), Mapping):
        inner = value
    if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
        return None
    function = {**inner, "parameters": literal(inner.get("parameters"), "{")}
    return {"type": "function", "function": _filled(function)}


def _filled(value: object) -> Any:
    """Without the keys of objects that have no value."""
    if isinstance(value, Mapping):
        return {str(key): _filled(one) for key, one in value.items() if one is not None}
    return [_filled(one) for one in value] if isinstance(value, list | tuple) else value
