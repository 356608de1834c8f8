"""Chat messages of a row, with calls of tools and their results, and the tools that the row offers.

They become what chat templates read: arguments of calls and descriptions of functions are objects, also where the row
has them as text. A null of JSON is a value, as in ``{"day": null}``; in a record of Arrow it is none, since Arrow fills
every object of a column with the keys of all others. What such a record has as JSON in a text is exact.
"""

from collections.abc import Mapping
from typing import Any

from gtpo_megatron.data.literal import literal
from gtpo_megatron.errors import DataError
from gtpo_megatron.untrusted.text import shown

Message = Mapping[str, Any]
"""One chat message: ``role`` and ``content``, both text; of the assistant's ``tool_calls``, and its thinking under the
keys of ``REASONING_KEYS`` that the row has; ``name`` and ``tool_call_id`` of a tool's result."""

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""What an earlier turn thought, by the name that its template knows."""

TOOLS_COLUMN = "tools"
"""Column of the functions that the policy is told of."""

_ASKING = ("user", "system", "developer")
"""Roles whose message always has a content; others say nothing beside a call, or return nothing."""


class ArrowRecord(dict[str, object]):
    """A row of Arrow: its objects have the keys of all rows, null where the row itself has none."""


def chat_messages(
    prompt: object, column: str, place: str, *, is_padded: bool = False, may_answer: bool = False
) -> tuple[Message, ...]:
    """A list of chat messages, the content of each a text or a list of parts; empty if it is something else.

    Args:
        prompt: value of the column.
        column: name of the column, for messages.
        place: place of the row, for messages.
        is_padded: whether keys that are null are not there, as in an :class:`ArrowRecord`.
        may_answer: the last turn may be the assistant's: it is given, and not the model's to write.

    Raises:
        DataError: the last turn is the assistant's and may not be, the user says nothing, or a call or some thinking
            cannot be read.
    """
    if not isinstance(prompt, list | tuple) or not all(isinstance(message, Mapping) for message in prompt):
        return ()
    found = tuple(_message(message, column, place, is_padded=is_padded) for message in prompt)
    if not all(isinstance(text, str) for message in found for text in (message["role"], message["content"])):
        return ()
    if not all(message["role"] for message in found):
        return ()
    for number, message in enumerate(found, start=1):
        if message["role"] == "user" and not message["content"]:
            raise DataError(f"{place}: {column} has an empty content of the user, in message {number}; expected a text")
    if found and found[-1]["role"] == "assistant" and not may_answer:
        raise DataError(f"{place}: {column} ends with the assistant's turn, which is the model's to write")
    return found


def tools_of(record: Mapping[str, object]) -> tuple[Mapping[str, Any], ...]:
    """The functions of the column ``tools``, as chat templates read them; none if it has anything else.

    A function may stand alone, or as OpenAI wraps it, or be a text of either.
    """
    given = record.get(TOOLS_COLUMN)
    listed = literal(given, "[")
    is_padded = isinstance(record, ArrowRecord) and listed is given
    tools = listed if isinstance(listed, list | tuple) else ()
    found = [_tool(literal(one, "{"), is_padded=is_padded and not isinstance(one, str)) for one in tools]
    return tuple(one for one in found if one is not None) if all(found) else ()


def _message(message: Mapping[str, object], column: str, place: str, *, is_padded: bool) -> dict[str, Any]:
    role, content = message.get("role"), content_text(message.get("content"))
    found: dict[str, Any] = {"role": role, "content": "" if content is None and role not in _ASKING else content}
    if role == "assistant":
        found |= _reasoning(message, column, place)
        if listed := literal(message.get("tool_calls"), "["):
            is_exact = isinstance(message.get("tool_calls"), str)
            found["tool_calls"] = _calls(listed, column, place, is_padded=is_padded and not is_exact)
    of_role = ("name", "tool_call_id") if role == "tool" else ("name",)
    return found | {key: str(message[key]) for key in of_role if message.get(key)}


def _reasoning(message: Mapping[str, object], column: str, place: str) -> dict[str, str]:
    """The thinking of a turn; null is none."""
    found = {key: value for key in REASONING_KEYS if (value := message.get(key)) is not None}
    for key, value in found.items():
        if not isinstance(value, str):
            raise DataError(f"{place}: {column} has {key}={shown(value)} in a turn of the assistant; expected a text")
    return found  # type: ignore[return-value]  # as checked


def content_text(content: object) -> object:
    """The text of a message: its parts, a line each; ``<type>`` for one that is no text."""
    if not isinstance(content, list | tuple):
        return content
    if not all(isinstance(part, str | Mapping) for part in content):
        return content
    texts = (part if isinstance(part, str) else part.get("text") or f"<{part.get('type')}>" for part in content)
    return "\n".join(map(str, texts))


def _calls(listed: object, column: str, place: str, *, is_padded: bool) -> list[dict[str, Any]]:
    """Calls of tools with arguments by name; those may be a text of JSON, as OpenAI has them."""
    calls = []
    for call in listed if isinstance(listed, list | tuple) else [listed]:
        inner = (call.get("function") or call) if isinstance(call, Mapping) else None
        arguments = _arguments(inner, is_padded=is_padded) if isinstance(inner, Mapping) else None
        if not isinstance(call, Mapping) or not isinstance(inner, Mapping) or arguments is None:
            raise DataError(
                f"{place}: {column} has the call of a tool {shown(call)}; expected "
                f"{{'function': {{'name': ..., 'arguments': {{...}}}}}}"
            )
        call_id = {"id": str(call["id"])} if call.get("id") else {}
        # in the order of the row: templates write the object as it is
        function = {key: inner[key] for key in inner if key in ("name", "arguments")} | {"arguments": arguments}
        calls.append({**call_id, "type": "function", "function": function})
    return calls


def _arguments(function: Mapping[Any, Any], *, is_padded: bool) -> Mapping[str, Any] | None:
    """The arguments of a call; without the key, and as an empty text, there are none. None if it is no call."""
    given = function.get("arguments", {})
    if given is None and is_padded:
        given = {}
    arguments = literal(given or "{}", "{") if isinstance(given, str) else given
    if not isinstance(function.get("name"), str) or not isinstance(arguments, Mapping):
        return None
    return _object(arguments, is_padded=is_padded and arguments is given)


def _tool(value: object, *, is_padded: bool) -> Mapping[str, Any] | None:
    """A function as OpenAI wraps it, in the order of the row; None if it is none."""
    if not isinstance(value, Mapping):
        return None
    inner = literal(value.get("function"), "{")
    is_bare = inner is None and isinstance(literal(value.get("parameters"), "{"), Mapping)
    if is_bare:
        inner = value
    if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
        return None
    function = _object(inner, is_padded=is_padded and not isinstance(value.get("function"), str))
    if isinstance(inner.get("parameters"), str):
        function["parameters"] = literal(inner["parameters"], "{")
    around = {} if is_bare else _object(value, is_padded=is_padded)
    return ({} if "type" in around else {"type": "function"}) | around | {"function": function}


def _object(value: Mapping[Any, Any], *, is_padded: bool) -> dict[str, Any]:
    return {str(key): _plain(one, is_padded=is_padded) for key, one in value.items() if not (is_padded and one is None)}


def _plain(value: object, *, is_padded: bool) -> Any:
    """Objects and lists all the way down; without the keys that Arrow has filled in."""
    if isinstance(value, Mapping):
        return _object(value, is_padded=is_padded)
    return [_plain(one, is_padded=is_padded) for one in value] if isinstance(value, list | tuple) else value
