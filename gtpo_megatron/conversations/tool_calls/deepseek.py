"""DeepSeek's form: ``function<sep>NAME`` and JSON in a fence (R1, V3), or ``NAME<sep>JSON`` (V3.1)."""

import re
from functools import partial

from gtpo_megatron.conversations.messages import ToolCall
from gtpo_megatron.conversations.tool_calls.json_calls import checked_call, json_object
from gtpo_megatron.conversations.tool_calls.parsed import Turn
from gtpo_megatron.conversations.tool_calls.scan import end_of
from gtpo_megatron.errors import DataError
from gtpo_megatron.untrusted.json_text import json_span
from gtpo_megatron.untrusted.text import shown

_OPENING, _CLOSING, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_HEAD = re.compile(rf"([^<]*){_SEPARATOR}\s*(?:([^\s{{`<]+)?\s*(```(?:json)?))?\s*")
_END = re.compile(rf"\s*(?:```\s*)?({_CLOSING}|(?={_OPENING}|<｜tool▁calls▁end｜>)|\Z)")
_EXPECTED = f"NAME and {_SEPARATOR}"
_WRAPPING = re.compile("<｜tool▁calls▁(?:begin|end)｜>")
_STRAYS = re.compile(f"{_SEPARATOR}|{_CLOSING}")


def read_deepseek(text: str, turn: Turn) -> None:
    """Reads all calls of a turn; the marks around all of them may be missing."""
    place = 0
    while not turn.is_full and (start := text.find(_OPENING, place)) >= 0:
        turn.keep(_WRAPPING.sub("", text[place:start]), _STRAYS)
        place = _block(text, start + len(_OPENING), turn)
    turn.keep(_WRAPPING.sub("", text[place:]), _STRAYS)
    if not turn.calls and not turn.malformed and _WRAPPING.search(text):
        turn.add(DataError("the marks around calls have none between them"), missing=_OPENING)


def _block(text: str, place: int, turn: Turn) -> int:
    """Reads a call; returns where it ends."""
    head = _HEAD.match(text, place)
    begin = head.end() if head else place
    value_end, is_whole = json_span(text, begin)
    end = _END.match(text, value_end) if is_whole else None
    if head and end:
        turn.add(partial(_call, head, text[begin:value_end]), missing="" if end[1] else _CLOSING)
        return end.end()
    close = end_of(_CLOSING, text, begin)
    body = text[begin : close and close - len(_CLOSING)]
    problem = partial(_call, head, body) if head else DataError(f"begins {shown(body.strip())}, expected {_EXPECTED}")
    turn.add(problem, missing="" if close else _CLOSING)
    return close or len(text)


def _call(head: re.Match[str], arguments: str) -> ToolCall:
    kind, name, fence = head.groups()
    if not fence or kind.strip() != "function":
        if name:
            raise DataError(f"has {shown(name)} behind {_SEPARATOR}, expected JSON")
        name = kind
    return checked_call(name, json_object(arguments))
