"""Tool calls in the text of a policy, in the form that its chat template teaches.

Whatever the text, a reader returns: a call that cannot be read becomes a line that the policy can be answered with. The
work is linear in the length of the text, ``MAX_CALLS`` calls are read of a turn, and arguments are JSON as
``untrusted/json_text.py`` takes it: no key twice, no depth beyond 64, no half of a surrogate pair, no infinite number.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from gtpo_megatron.config.environment import FORMS, CallForm
from gtpo_megatron.conversations.messages import ToolCall
from gtpo_megatron.errors import DataError
from gtpo_megatron.untrusted.json_text import parse_json
from gtpo_megatron.untrusted.text import shown

_SIGNS: dict[CallForm, str] = {
    "deepseek": "<｜tool▁call▁begin｜>",
    "harmony": "<|channel|>",
    "glm": "<arg_key>",
    "qwen3_coder": "<function=",
    "hermes": "<tool_call>",
    "mistral": "[TOOL_CALLS]",
    "llama3": "ipython",
}

MAX_CALLS = 64
"""Calls that are read of a turn; what follows is one malformed call."""

MAX_NAME = 256
"""Characters of the name of a tool or of an argument."""

MAX_SCHEMA_DEPTH = 8
"""Branches and references within a schema that are followed; one may refer to itself."""

_Kinds = frozenset[str] | None
"""Kinds of JSON values, by JSON schema's names; None: of any kind."""

_ToolKinds = Mapping[str, Mapping[str, _Kinds]]
"""By tool and argument, the kinds of values that its schema allows."""

_Reader = Callable[[str, _ToolKinds], ToolCall]
"""Reads the text of one call; raises DataError."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedText:
    """A turn's text, taken apart.

    Attributes:
        content: the text without calls and reasoning.
        reasoning: text of harmony's channel for thinking.
        calls: calls, in the text's order.
        malformed: complaint about each call that cannot be read.
    """

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    malformed: tuple[str, ...] = ()


def find_form(template: str) -> CallForm | None:
    """The form of calls that a chat template writes; None if it knows no tools."""
    return next((form for form in FORMS if _SIGNS[form] in template), None)


def parse_calls(
    text: str, form: CallForm, *, is_truncated: bool = False, tools: Sequence[Mapping[str, Any]] = ()
) -> ParsedText:
    """Takes a turn's text apart; never raises.

    Args:
        text: the turn, with special tokens as text.
        form: form of the calls.
        is_truncated: whether the length limit cut the turn.
        tools: as in ``Opening``; forms that write arguments without quotes (``glm``, ``qwen3_coder``) take from their
            schemas which arguments may be text. Where one says nothing, an argument is JSON if it can be read as such.
    """
    found = _Found(_tool_kinds(tools), is_truncated)
    match form:
        case "harmony":
            return _harmony(text, found)
        case "mistral":
            content = _mistral(text, found)
        case "llama3":
            content = _llama3(text, found)
        case "deepseek":
            content = _blocks(text, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", _deepseek_call, found)
            content = content.replace("<｜tool▁calls▁begin｜>", "").replace("<｜tool▁calls▁end｜>", "")
        case "glm" | "qwen3_coder" | "hermes":
            content = _blocks(text, "<tool_call>", "</tool_call>", _TAGGED[form], found)
    if found.calls or found.malformed:
        content = content.strip()
    return ParsedText(content=content, calls=tuple(found.calls), malformed=tuple(found.malformed))


class _Found:
    """Calls found so far."""

    def __init__(self, kinds: _ToolKinds, is_truncated: bool) -> None:
        self.kinds, self.is_truncated = kinds, is_truncated
        self.calls: list[ToolCall] = []
        self.malformed: list[str] = []
        self.is_full = False

    def add(self, read: Callable[[], ToolCall], *, missing: str = "") -> None:
        """Adds a call.

        Args:
            read: returns it, or raises DataError.
            missing: the mark that should end the call and is not there.
        """
        number = len(self.calls) + len(self.malformed) + 1
        if number > MAX_CALLS:
            if not self.is_full:
                self.malformed.append(f"call {number} and what follows: only {MAX_CALLS} calls of a turn are read")
            self.is_full = True
        elif missing and self.is_truncated:
            self.malformed.append(f"call {number}: cut off by the length limit")
        else:
            try:
                self.calls.append(read())
            except DataError as problem:
                end = f", and {missing} is missing" if missing else ""
                self.malformed.append(f"call {number}: {problem}{end}")


def _blocks(text: str, opening: str, closing: str, reader: _Reader, found: _Found) -> str:
    """Reads what stands between marks; returns the text without it. The last mark may be missing."""
    kept = []
    before, mark, rest = text.partition(opening)
    pieces = rest.split(opening) if mark else []
    kept.append(before)
    for piece in pieces:
        body, end, after = piece.partition(closing)
        found.add(partial(reader, body, found.kinds), missing="" if end else closing)
        kept.append(after)
    return "".join(kept)


# ------------------------------------------------------------------------------------------------------- JSON of a call
def _json(text: str) -> Any:
    """A JSON value whose numbers are finite."""
    value = parse_json(text.strip(), "the JSON")
    try:
        json.dumps(value, allow_nan=False)
    except ValueError as problem:
        raise DataError("the JSON has a number that is not finite") from problem
    return value


def _object(text: str) -> dict[str, Any]:
    value = _json(text)
    if not isinstance(value, dict):
        raise DataError(f"the JSON is {shown(value)}, expected an object")
    return value


def _call(name: object, arguments: object, call_id: object = "") -> ToolCall:
    """A checked call; arguments may be an object, or one written into a text."""
    if not isinstance(name, str) or not name.strip() or len(name) > MAX_NAME:
        raise DataError(f"the name of the tool is {shown(name)}, expected text of at most {MAX_NAME} characters")
    if isinstance(arguments, str):
        arguments = _object(arguments) if arguments.strip() else {}
    if not isinstance(arguments, dict):
        raise DataError(f"the arguments are {shown(arguments)}, expected a JSON object")
    is_id = isinstance(call_id, str) and len(call_id) <= MAX_NAME
    return ToolCall(name=name.strip(), arguments=arguments, call_id=str(call_id) if is_id else "")


def _named_call(value: object) -> ToolCall:
    """Of ``{"name": ..., "arguments": ...}``; ``parameters`` is Llama's word for arguments."""
    if not isinstance(value, dict):
        raise DataError(f"is {shown(value)}, expected a JSON object")
    if "name" not in value:
        raise DataError(f"lacks name; it has {shown(sorted(value))}")
    return _call(value["name"], value.get("arguments", value.get("parameters", {})), value.get("id", ""))


def _hermes_call(text: str, _: _ToolKinds) -> ToolCall:
    return _named_call(_json(text))


# -------------------------------------------------------------------------------------------------- arguments in marks
def _tool_kinds(tools: Sequence[Mapping[str, Any]]) -> _ToolKinds:
    found: dict[str, Mapping[str, _Kinds]] = {}
    for tool in tools:
        function = tool.get("function", tool)
        parameters = function.get("parameters") if isinstance(function, Mapping) else None
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        if isinstance(parameters, Mapping) and isinstance(properties, Mapping):
            found[str(function.get("name"))] = {
                name: _allowed(schema, parameters.get("$defs"), MAX_SCHEMA_DEPTH) for name, schema in properties.items()
            }
    return found


def _allowed(schema: object, definitions: object, depth: int) -> _Kinds:
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


def _allowed_below(schema: Mapping[str, Any], definitions: object, depth: int) -> _Kinds:
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


_KINDS: Mapping[type, frozenset[str]] = {
    type(None): frozenset({"null"}),
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"number"}),
    str: frozenset({"string"}),
    list: frozenset({"array"}),
    dict: frozenset({"object"}),
}


def _marked_call(name: str, pairs: Iterator[tuple[str, str]], kinds: _ToolKinds) -> ToolCall:
    name = name.strip()
    arguments: dict[str, Any] = {}
    for key, text in pairs:
        if key in arguments:
            raise DataError(f"the argument {shown(key)} is there twice")
        if len(key) > MAX_NAME:
            raise DataError(f"the name of an argument has {len(key)} characters; the most is {MAX_NAME}")
        arguments[key] = _argument(text, kinds.get(name, {}).get(key))
    return _call(name, arguments)


def _argument(text: str, kinds: _Kinds) -> Any:
    """The value that was written without quotes: JSON if it can be read as such, else text.

    Where text is allowed, it stays text unless what JSON makes of it is of another kind that is allowed too: ``null``
    of an optional text is none, and ``7`` is text.
    """
    try:
        value = _json(text)
    except DataError:
        return text
    if kinds is None or "string" not in kinds:
        return value
    return value if _kinds_of(value) & (kinds - {"string"}) else text


def _pairs(text: str, key: tuple[str, str], value: tuple[str, str]) -> Iterator[tuple[str, str]]:
    """Names and values between their marks, in order."""
    place = text.find(key[0])
    while place >= 0:
        end = text.find(key[1], place)
        if end < 0:
            raise DataError(f"a name of an argument lacks {key[1]}")
        name = text[place + len(key[0]) : end].strip()
        begin = text.find(value[0], end + len(key[1])) if value[0] else end + len(key[1])
        close = text.find(value[1], begin) if begin >= 0 else -1
        if close < 0:
            raise DataError(f"the argument {shown(name)} lacks {value[1]}")
        yield name, text[begin + len(value[0]) : close]
        place = text.find(key[0], close)


def _glm_call(text: str, kinds: _ToolKinds) -> ToolCall:
    name, mark, _ = text.partition("<arg_key>")
    pairs = _pairs(text[len(name) :], ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>"))
    return _marked_call(name, pairs if mark else iter(()), kinds)


def _qwen3_coder_call(text: str, kinds: _ToolKinds) -> ToolCall:
    before, mark, rest = text.partition("<function=")
    name, end, body = rest.partition(">")
    if not mark or not end or before.strip():
        raise DataError(f"begins {shown(text.strip())}, expected <function=NAME>")
    pairs = _pairs(body, ("<parameter=", ">"), ("", "</parameter>"))
    # The template writes each value on lines of its own.
    return _marked_call(name, ((key, value.removeprefix("\n").removesuffix("\n")) for key, value in pairs), kinds)


_TAGGED: dict[CallForm, _Reader] = {"glm": _glm_call, "qwen3_coder": _qwen3_coder_call, "hermes": _hermes_call}


# ------------------------------------------------------------------------------------------------------- other families
def _deepseek_call(text: str, _: _ToolKinds) -> ToolCall:
    """``function<sep>NAME`` and JSON in a fence (R1, V3), or ``NAME<sep>JSON`` (V3.1)."""
    head, mark, tail = text.partition("<｜tool▁sep｜>")
    if not mark:
        raise DataError(f"begins {shown(text.strip())}, expected NAME and <｜tool▁sep｜>")
    name, fence, rest = tail.partition("```json")
    if not fence:
        return _call(head, _object(tail))
    return _call(name, _object(rest.strip().removesuffix("```")))


def _mistral(text: str, found: _Found) -> str:
    """``[TOOL_CALLS]`` before a list of JSON objects, or ``[TOOL_CALLS]NAME[CALL_ID]ID[ARGS]JSON`` a call."""
    content, *pieces = text.split("[TOOL_CALLS]")
    for piece in pieces:
        if piece.lstrip()[:1] != "[":
            found.add(partial(_mistral_call, piece), missing="" if piece.rstrip().endswith("}") else "}")
            continue
        try:
            values = _json(piece)
        except DataError:
            found.add(partial(_hermes_call, piece, {}), missing="" if piece.rstrip().endswith("]") else "]")
            continue
        for value in values:
            found.add(partial(_named_call, value))
    return content


def _mistral_call(text: str) -> ToolCall:
    if text.lstrip()[:1] == "{":
        return _named_call(_json(text))
    head, mark, arguments = text.partition("[ARGS]")
    if not mark:
        head, brace, rest = text.partition("{")
        arguments = brace + rest
    name, _mark, call_id = head.partition("[CALL_ID]")
    return _call(name, _object(arguments), call_id.strip())


def _llama3(text: str, found: _Found) -> str:
    """A turn that is a JSON object with ``name`` and ``parameters``, or that begins with ``<|python_tag|>``."""
    before, mark, rest = text.partition("<|python_tag|>")
    body = (rest if mark else text).strip()
    if not mark and not (body.startswith("{") and '"name"' in body):
        return text
    try:
        value = _object(body)
    except DataError:
        found.add(partial(_hermes_call, body, {}), missing="" if body.endswith("}") else "}")
        return before if mark else ""
    if not mark and not ("parameters" in value or "arguments" in value):
        return text  # an answer that is JSON
    found.add(partial(_named_call, value))
    return before if mark else ""


_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_END = re.compile(r"<\|(?:end|call|return)\|>")


def _harmony(text: str, found: _Found) -> ParsedText:
    """Messages on channels: ``analysis`` is reasoning, one with a recipient is a call, all others are the answer."""
    content, reasoning = [], []
    for number, piece in enumerate(text.split("<|start|>")):
        header, mark, rest = piece.partition("<|message|>")
        if not mark:  # text that is in no message, or a header that was cut off
            content.append("" if number else _END.sub("", header.partition("<|channel|>")[0]))
            continue
        end = _END.search(rest)
        body = rest[: end.start()] if end else rest
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient:
            name = recipient[1].removeprefix("functions.")
            # The end of the last call is the turn's, which the caller has taken off.
            missing = "" if end or not found.is_truncated else "<|call|>"
            found.add(partial(_call, name, body), missing=missing)
        elif channel and channel[1] == "analysis":
            reasoning.append(body)
        else:
            content.append(body)
    return ParsedText(
        content="\n".join(one for one in content if one),
        reasoning="\n".join(reasoning),
        calls=tuple(found.calls),
        malformed=tuple(found.malformed),
    )
