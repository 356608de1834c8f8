"""Calls whose arguments stand between marks, without quotes: those of GLM and of Qwen3-Coder."""

import re
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

from gtpo_megatron.conversations.messages import ToolCall
from gtpo_megatron.conversations.tool_calls.json_calls import MAX_NAME, checked_call
from gtpo_megatron.conversations.tool_calls.parsed import Turn
from gtpo_megatron.conversations.tool_calls.scan import end_of, value_end
from gtpo_megatron.conversations.tool_calls.schemas import unquoted
from gtpo_megatron.errors import DataError
from gtpo_megatron.untrusted.text import shown

_BLOCK_CLOSE = "</tool_call>"


@dataclass(frozen=True, kw_only=True, slots=True)
class Marks:
    """How a form writes a call.

    Attributes:
        opening: first mark of a call, or of a block of calls.
        head: pattern of all before the arguments, with the tool's name as its group.
        key: pattern of all before a value, with the argument's name as its group.
        values: pattern of what opens a value, where that may stand, and of what closes one.
        values_in_line: the same for a value that begins in the line of its mark.
        value_close: mark that closes a value.
        follows: pattern of what may stand behind a value.
        boundary: pattern of what stands between two calls; a value that has it may be two calls.
        end: pattern of what stands behind the arguments; empty where the closing marks are missing.
        strays: marks that have no place outside of calls.
        has_lines: whether line breaks around a value are none of its own.
    """

    opening: re.Pattern[str]
    head: re.Pattern[str]
    key: re.Pattern[str]
    values: re.Pattern[str]
    values_in_line: re.Pattern[str]
    value_close: str
    follows: re.Pattern[str]
    boundary: re.Pattern[str]
    end: re.Pattern[str]
    strays: re.Pattern[str]
    has_lines: bool


GLM = Marks(
    opening=re.compile("<tool_call>"),
    head=re.compile(r"""<tool_call>\s*([^\s<>{}\[\]"',]+)"""),
    key=re.compile(r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>"),
    values=re.compile(r"</arg_key>\s*<arg_value>|</arg_value>"),
    values_in_line=re.compile(r"</arg_key>\s*<arg_value>|</arg_value>"),
    value_close="</arg_value>",
    follows=re.compile(r"\s*(?:<arg_key>|</?tool_call>|\Z)"),
    boundary=re.compile(r"</arg_value>\s*</tool_call>\s*<tool_call>"),
    end=re.compile(r"\s*(?:</tool_call>|(?=<tool_call>)|\Z)"),
    strays=re.compile("</?arg_(?:key|value)>|</tool_call>"),
    has_lines=False,
)
"""GLM-4.5 and later."""

QWEN3_CODER = Marks(
    opening=re.compile("<tool_call>|<function="),
    head=re.compile(r"(?:<tool_call>\s*)?<function=\s*([^\s<>]+)\s*>"),
    key=re.compile(r"\s*<parameter=([^<>\n]*)>"),
    values=re.compile(r"(?<=[\n>])[ \t]*<parameter=|</parameter>"),
    values_in_line=re.compile("<parameter=|</parameter>"),
    value_close="</parameter>",
    follows=re.compile(r"\s*(?:<parameter=|<function=|</function>|</?tool_call>|\Z)"),
    boundary=re.compile(r"</parameter>\s*</function>\s*(?:</tool_call>)?\s*(?:<tool_call>)?\s*<function="),
    end=re.compile(r"\s*(?:</function>(?:[^<]*</tool_call>)?|</tool_call>|(?=<tool_call>|<function=)|\Z)"),
    strays=re.compile("<parameter=|</tool_call>"),
    has_lines=True,
)
"""Qwen3-Coder, Qwen3.5, Nemotron 3. A block may have several functions, and a function no block."""


def read_marked(text: str, turn: Turn, marks: Marks) -> None:
    """Reads all calls of a turn."""
    place = 0
    while not turn.is_full and (mark := marks.opening.search(text, place)):
        turn.keep(text[place : mark.start()], marks.strays)
        try:
            call, place, missing = _call(text, mark.start(), turn, marks)
        except DataError as problem:
            close = end_of(_BLOCK_CLOSE, text, mark.end())
            turn.add(problem, missing="" if close else _BLOCK_CLOSE)
            place = close or len(text)
        else:
            turn.add(call, missing=missing)
    turn.keep(text[place:], marks.strays)


def _call(text: str, place: int, turn: Turn, marks: Marks) -> tuple[ToolCall, int, str]:
    """The call that begins at a place, where it ends, and the mark that is missing there."""
    head = marks.head.match(text, place)
    if not head:
        raise DataError(f"begins {shown(text[place : place + 60])}, expected a name without blanks")
    name, place = head[1], head.end()
    kinds = turn.kinds.get(name, {})
    arguments: dict[str, Any] = {}
    while found := marks.key.match(text, place):
        key = found[1].strip()
        if key in arguments:
            raise DataError(f"the argument {shown(key)} is there twice")
        if len(key) > MAX_NAME:
            raise DataError(f"the name of an argument has {len(key)} characters; the most is {MAX_NAME}")
        value, place = _value(text, found.end(), marks, kinds.keys() - arguments.keys() - {key})
        if marks.boundary.search(value):
            raise DataError(f"the argument {shown(key)} may end before the next call, or be all that follows")
        if marks.has_lines:
            value = value.removeprefix("\n").removesuffix("\n")
        arguments[key] = unquoted(value, kinds.get(key))
    end = marks.end.match(text, place)
    if not end:
        raise DataError(f"has {shown(text[place : place + 60].strip())} between its arguments or before its end")
    is_closed = bool(end[0].strip())
    if not arguments and not is_closed:
        raise DataError(f"ends behind the name {shown(name)}")
    following = marks.opening.search(text, end.end())
    if marks.value_close in text[end.end() : following.start() if following else None]:
        raise DataError(f"has {marks.value_close} behind its end, where a value may have been cut")
    return checked_call(name, arguments), end.end(), "" if is_closed else _BLOCK_CLOSE


def _value(text: str, place: int, marks: Marks, others: Set[str]) -> tuple[str, int]:
    """The value that begins at a place, and where what follows it begins.

    A value that is not closed ends before the next argument, if that is one of the tool's others.
    """
    values = marks.values if text.startswith("\n", place) else marks.values_in_line
    try:
        close = value_end(text, place, marks.value_close, values, marks.follows)
    except DataError:
        following = marks.key.search(text, place)
        if not following or following[1].strip() not in others:
            raise
        value = text[place : following.start()]
        if marks.opening.search(value) or _BLOCK_CLOSE in value:  # that is an argument of another call
            raise
        return value, following.start()
    return text[place:close], close + len(marks.value_close)
