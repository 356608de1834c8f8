"""Values that a model wrote without quotes, by the schema of the tool."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gtpo_megatron.conversations.tool_calls.json_calls import json_value
from gtpo_megatron.data.literal import literal
from gtpo_megatron.errors import DataError

MAX_SCHEMA_DEPTH = 8
"""Branches and references within a schema that are followed; one may refer to itself."""

Kinds = frozenset[str] | None
"""Kinds of JSON values, by JSON schema's names; None: of any kind."""

ToolKinds = Mapping[str, Mapping[str, Kinds]]
"""By tool and argument, the kinds of values that its schema allows."""

_KINDS: Mapping[type, frozenset[str]] = {
    type(None): frozenset({"null"}),
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"number"}),
    str: frozenset({"string"}),
    list: frozenset({"array"}),
    dict: frozenset({"object"}),
}

_WORDS: Mapping[str, object] = {"True": True, "False": False, "None": None}
"""What Python calls true, false and null."""


def tool_kinds(tools: Sequence[Mapping[str, Any]]) -> ToolKinds:
    """The kinds of values that schemas of functions allow, as OpenAI writes them."""
    found: dict[str, Mapping[str, Kinds]] = {}
    for tool in tools:
        function = tool.get("function", tool)
        if not isinstance(function, Mapping):
            continue
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        known = properties.items() if isinstance(parameters, Mapping) and isinstance(properties, Mapping) else ()
        definitions = parameters.get("$defs") if isinstance(parameters, Mapping) else None
        found[str(function.get("name"))] = {
            name: _allowed(schema, definitions, MAX_SCHEMA_DEPTH) for name, schema in known
        }
    return found


def unquoted(text: str, kinds: Kinds) -> Any:
    """The value that was written without quotes: JSON if it can be read as such, else text.

    Where text is allowed, it stays text unless what JSON makes of it is of another kind that is allowed too: ``null``
    of an optional text is none, and ``7`` is text. Where it is not, Python's spelling is read as well.
    """
    try:
        value = json_value(text)
    except DataError:
        return text if kinds is None or "string" in kinds else _of_python(text, kinds)
    if kinds is None or "string" not in kinds:
        return value
    return value if _kinds_of(value) & (kinds - {"string"}) else text


def _of_python(text: str, kinds: frozenset[str]) -> Any:
    """A value as Python writes it, if it is of an allowed kind; else the text."""
    word = text.strip()
    value = _WORDS[word] if word in _WORDS else literal(literal(text, "{"), "[")
    try:
        value = json_value(json.dumps(value))  # tuples and keys that are no text are as JSON has them
    except (TypeError, ValueError, RecursionError):
        return text
    return value if _kinds_of(value) & kinds else text


def _allowed(schema: object, definitions: object, depth: int) -> Kinds:
    """The kinds of values that a schema allows, as far as it says by type, values, branches or a reference."""
    if not isinstance(schema, Mapping) or not depth:
        return None
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({named})
    if isinstance(named, list):
        return frozenset(one for one in named if isinstance(one, str))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return frozenset().union(*map(_kinds_of, values))
    return _allowed_below(schema, definitions, depth - 1)


def _allowed_below(schema: Mapping[str, Any], definitions: object, depth: int) -> Kinds:
    for branches in (schema.get("anyOf"), schema.get("oneOf")):
        if isinstance(branches, list):
            found = [_allowed(one, definitions, depth) for one in branches]
            said = [one for one in found if one is not None]
            return frozenset().union(*said) if len(said) == len(found) else None
    name = str(schema.get("$ref")).removeprefix("#/$defs/")
    referred = definitions.get(name) if isinstance(definitions, Mapping) else None
    every = schema.get("allOf")
    each = [referred, *(every if isinstance(every, list) else [])]
    return next((kinds for one in each if (kinds := _allowed(one, definitions, depth)) is not None), None)


def _kinds_of(value: object) -> frozenset[str]:
    """The kinds that a JSON value is of."""
    return _KINDS.get(type(value), frozenset())
