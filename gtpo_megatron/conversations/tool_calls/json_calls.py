"""Calls that are JSON objects, and the JSON of arguments."""

import json
from collections.abc import Mapping, Set
from typing import Any

from gtpo_megatron.conversations.messages import ToolCall
from gtpo_megatron.errors import DataError
from gtpo_megatron.untrusted.json_text import parse_json
from gtpo_megatron.untrusted.text import shown

MAX_NAME = 256
"""Characters of the name of a tool or of an argument."""

_CALL_KEYS = frozenset({"name", "arguments", "parameters", "type", "id"})
"""Keys of an object that is a call and nothing else; ``parameters`` is Llama's word for arguments."""


def json_value(text: str) -> Any:
    """A JSON value whose numbers are finite."""
    value = parse_json(text.strip(), "the JSON")
    try:
        json.dumps(value, allow_nan=False)
    except ValueError as problem:
        raise DataError("the JSON has a number that is not finite") from problem
    return value


def json_object(text: str) -> dict[str, Any]:
    """A JSON object, as :func:`json_value`."""
    value = json_value(text)
    if not isinstance(value, dict):
        raise DataError(f"the JSON is {shown(value)}, expected an object")
    return value


def checked_call(name: object, arguments: object, call_id: object = "") -> ToolCall:
    """A call; arguments may be an object, or one written into a text.

    Raises:
        DataError: it has no name without white space, or no arguments by name.
    """
    if not isinstance(name, str) or len(name.split()) != 1 or len(name) > MAX_NAME:
        raise DataError(
            f"the name of the tool is {shown(name)}, expected a text without blanks of at most {MAX_NAME} characters"
        )
    if isinstance(arguments, str):
        arguments = json_object(arguments) if arguments.strip() else {}
    if not isinstance(arguments, dict):
        raise DataError(f"the arguments are {shown(arguments)}, expected a JSON object")
    is_id = isinstance(call_id, str) and len(call_id) <= MAX_NAME
    return ToolCall(name=name.strip(), arguments=arguments, call_id=str(call_id) if is_id else "")


def call_of(value: object) -> ToolCall:
    """The call that a JSON value is: ``{"name": ..., "arguments": ...}``, also as OpenAI wraps it.

    Raises:
        DataError: it is none.
    """
    if not isinstance(value, dict):
        raise DataError(f"is {shown(value)}, expected a JSON object")
    found = _function(value)
    if "name" not in found:
        raise DataError(f"lacks name; it has {shown(sorted(found))}")
    arguments = found.get("arguments", found.get("parameters", {}))
    return checked_call(found["name"], arguments, value.get("id", ""))


def read_call(text: str) -> ToolCall:
    """As :func:`call_of`, of the text of the value."""
    return call_of(json_value(text))


def is_call(value: object, names: Set[str]) -> bool:
    """Whether a JSON value without marks is a call, right or wrong, and not an answer that is JSON.

    Args:
        value: the JSON value.
        names: names of the tools that there are.
    """
    if not isinstance(value, dict):
        return False
    found = _function(value)
    name, arguments = found.get("name"), found.get("arguments", found.get("parameters"))
    if not isinstance(name, str):
        return False
    is_object = isinstance(arguments, dict) or (isinstance(arguments, str) and arguments.lstrip().startswith("{"))
    if found.keys() <= _CALL_KEYS:
        return is_object or name in names or value.get("type") == "function"
    return name in names and bool(found.keys() & {"arguments", "parameters"})


def _function(value: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = value.get("function")
    return inner if isinstance(inner, dict) else value
