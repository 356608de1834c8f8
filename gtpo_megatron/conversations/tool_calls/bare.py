"""JSON calls without marks around them: Llama's form, and what is left of other forms whose marks were not written."""

import re
from collections.abc import Set
from functools import partial
from typing import Any

from gtpo_megatron.conversations.tool_calls.json_calls import call_of, is_call, json_value, read_call
from gtpo_megatron.conversations.tool_calls.parsed import Turn
from gtpo_megatron.conversations.tool_calls.scan import after_space, json_values
from gtpo_megatron.errors import DataError
from gtpo_megatron.untrusted.json_text import json_span

_TAG = "<|python_tag|>"
_START = re.compile(r'<\|python_tag\|>|\{\s*"|\[\s*\{\s*"')
_FIRST_KEY = re.compile(r'\[?\s*\{\s*"(?:name|arguments|parameters|type|function|id)"')
_SEPARATOR = re.compile(r"\s*[;,]\s*(?=[\[{<]|\Z)|")
_KEYS = ('"arguments"', '"parameters"')

_MAX_BROKEN = 1000
"""Beginnings of JSON that is none, of which each takes time with the length of the text; behind them none is read."""


def read_llama3(text: str, turn: Turn) -> None:
    """Objects with ``name`` and ``parameters``, lists of them, and whatever ``<|python_tag|>`` stands before."""
    last_name, last_arguments = text.rfind('"name"'), max(map(text.rfind, _KEYS))
    kept = place = num_broken = 0
    while not turn.is_full and num_broken < _MAX_BROKEN and (mark := _START.search(text, place)):
        is_tagged = mark[0] == _TAG
        start = after_space(text, mark.end()) if is_tagged else mark.start()
        end, is_whole = json_span(text, start)
        if is_whole:
            is_meant = is_tagged or _are_calls(text[start:end], turn.names)
        else:
            has_keys = turn.is_truncated or min(last_name, last_arguments) > start
            is_meant = is_tagged or (has_keys and _FIRST_KEY.match(text, start) is not None)
        if not is_meant:  # an answer that is JSON
            place = max(end, mark.start() + 1)
            num_broken += not is_whole
            continue
        turn.keep(text[kept : mark.start()])
        if is_whole:
            add_calls(text[start:end], turn)
            kept = place = _SEPARATOR.match(text, end).end()  # type: ignore[union-attr]  # it may be empty
        else:
            turn.add(partial(read_call, text[start:]), missing="" if text.rstrip().endswith("}") else "}")
            kept = place = len(text)
    if num_broken == _MAX_BROKEN and min(last_name, last_arguments) > place:
        turn.add(DataError(f"stands behind {_MAX_BROKEN} objects that are no JSON"))
    turn.keep(text[kept:])


def read_whole(text: str, turn: Turn) -> bool:
    """Takes a text that is nothing but calls; False if it is another."""
    values, end = json_values(text, 0)
    if not values or text[end:].strip() or not all(_are_calls(one, turn.names) for one in values):
        return False
    for one in values:
        add_calls(one, turn)
    return True


def add_calls(text: str, turn: Turn, *, missing: str = "") -> None:
    """Adds the calls of a JSON value, which is one or a list of them."""
    value = _value(text)
    if not isinstance(value, list) or not value:
        turn.add(partial(read_call, text), missing=missing)
        return
    for one in value:
        turn.add(partial(call_of, one), missing=missing)


def _are_calls(text: str, names: Set[str]) -> bool:
    """Whether a whole JSON value is a call or a list of calls."""
    value = _value(text)
    if value is None:  # refused for what it contains
        return '"name"' in text and any(key in text for key in _KEYS)
    listed = value if isinstance(value, list) else [value]
    return bool(listed) and all(is_call(one, names) for one in listed)


def _value(text: str) -> Any:
    try:
        return json_value(text)
    except DataError:
        return None
