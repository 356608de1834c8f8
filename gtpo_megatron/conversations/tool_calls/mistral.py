"""Mistral's forms: ``[TOOL_CALLS]`` before a list of JSON, or ``[TOOL_CALLS]NAME[CALL_ID]ID[ARGS]JSON`` a call."""

import re
from functools import partial

from gtpo_megatron.conversations.messages import ToolCall
from gtpo_megatron.conversations.tool_calls.bare import add_calls
from gtpo_megatron.conversations.tool_calls.json_calls import checked_call, json_object
from gtpo_megatron.conversations.tool_calls.parsed import Turn
from gtpo_megatron.untrusted.json_text import json_span

_OPENING = "[TOOL_CALLS]"
_HEAD = re.compile(r"\s*([^\[{]*)(?:\[CALL_ID\]([^\[{]*))?(?:\[ARGS\])?\s*")
_MORE = re.compile(r'\s*[,;]\s*(?=\{\s*"(?:name|arguments|id|type|function)")')
_STRAYS = re.compile(r"\[ARGS\](?=\s*\{)")


def read_mistral(text: str, turn: Turn) -> None:
    """Reads all calls of a turn, with or without words behind them."""
    place = 0
    while not turn.is_full and (start := text.find(_OPENING, place)) >= 0:
        turn.keep(text[place:start], _STRAYS)
        place = _block(text, start + len(_OPENING), turn)
    turn.keep(text[place:], _STRAYS)


def _block(text: str, place: int, turn: Turn) -> int:
    """Reads what stands behind the mark; returns where it ends."""
    head = _HEAD.match(text, place)
    assert head is not None, "all of it may be empty"
    begin = head.end()
    end, is_whole = json_span(text, begin)
    if not is_whole:  # up to the next mark: there is none that ends a call
        following = text.find(_OPENING, begin)
        end = following if following >= 0 else len(text)
    body = text[begin:end]
    last = "]" if body.startswith("[") else "}"
    missing = "" if body.rstrip().endswith(last) else last
    if head[1].strip():
        turn.add(partial(_call, head, body), missing=missing)
        return end
    add_calls(body, turn, missing=missing)
    more = _MORE.match(text, end)  # another object of a list that has no brackets
    return _block(text, more.end(), turn) if more and not turn.is_full else end


def _call(head: re.Match[str], arguments: str) -> ToolCall:
    return checked_call(head[1], json_object(arguments), (head[2] or "").strip())
