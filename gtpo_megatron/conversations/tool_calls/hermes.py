"""``<tool_call>`` around JSON: Qwen2.5, Qwen3, Hermes, Granite 4."""

import re
from functools import partial

from gtpo_megatron.conversations.tool_calls.json_calls import read_call
from gtpo_megatron.conversations.tool_calls.parsed import Turn
from gtpo_megatron.conversations.tool_calls.scan import after_space, end_of, json_values
from gtpo_megatron.untrusted.json_text import json_span

OPENING, CLOSING = "<tool_call>", "</tool_call>"
_MARK = re.compile(r"</?tool_call>")


def read_hermes(text: str, turn: Turn) -> None:
    """An object in each block, or several; the last closing mark, or an opening one, may be missing."""
    place = 0
    while not turn.is_full and (mark := _MARK.search(text, place)):
        before = text[place : mark.start()]
        if mark[0] == OPENING:
            turn.keep(before)
            place = _block(text, mark.end(), turn)
        else:
            _unopened(before, turn)
            place = mark.end()
    turn.keep(text[place:])


def _block(text: str, place: int, turn: Turn) -> int:
    """Reads what stands behind an opening mark; returns where the block ends."""
    values, end = json_values(text, place)
    after = after_space(text, end)
    if values and (after == len(text) or text.startswith((OPENING, CLOSING), after)):
        is_closed = text.startswith(CLOSING, after)
        for value in values:
            turn.add(partial(read_call, value), missing="" if is_closed else CLOSING)
        return after + len(CLOSING) * is_closed
    close = end_of(CLOSING, text, end)
    body = text[place : close and close - len(CLOSING)]
    turn.add(partial(read_call, body), missing="" if close else CLOSING)
    return close or len(text)


def _unopened(before: str, turn: Turn) -> None:
    """Reads what stands before a closing mark that nothing has opened."""
    start = before.find("{")
    end, is_whole = json_span(before, start) if start >= 0 else (0, False)
    if is_whole and not before[end:].strip():
        turn.keep(before[:start])
        turn.add(partial(read_call, before[start:end]))
    else:
        turn.keep(before + CLOSING, _MARK)
