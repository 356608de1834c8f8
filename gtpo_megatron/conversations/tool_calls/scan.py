"""Places in a turn's text: white space, marks, JSON values, and values that may contain their own marks."""

import re

from gtpo_megatron.errors import DataError
from gtpo_megatron.untrusted.json_text import json_span
from gtpo_megatron.untrusted.text import shown

_SPACE = re.compile(r"\s*")


def after_space(text: str, place: int) -> int:
    """The first place from there on that is no white space."""
    found = _SPACE.match(text, place)
    return found.end() if found else place


def end_of(mark: str, text: str, place: int) -> int | None:
    """The place behind the next mark; None if there is none."""
    start = text.find(mark, place)
    return start + len(mark) if start >= 0 else None


def json_values(text: str, place: int) -> tuple[list[str], int]:
    """Whole JSON values that stand one behind the other, and where the last one ends."""
    values: list[str] = []
    while True:
        start = after_space(text, place)
        end, is_whole = json_span(text, start)
        if not is_whole:
            return values, place
        values.append(text[start:end])
        place = end


def value_end(text: str, place: int, closing: str, marks: re.Pattern[str], follows: re.Pattern[str]) -> int:
    """Where a value without quotes ends, which may have marks in it.

    A closing mark is the value's text where it closes what an opening mark there has opened, or where nothing follows
    that may follow a value. A value that opens more than it closes has no end.

    Args:
        text: text of the turn.
        place: place at which the value begins.
        closing: mark that closes a value.
        marks: pattern of what opens a value, and of the closing mark.
        follows: pattern of what may stand behind a value.

    Raises:
        DataError: it does not end.
    """
    depth = 0
    for mark in marks.finditer(text, place):
        if mark[0] != closing:
            depth += 1
        elif depth:
            depth -= 1
        elif follows.match(text, mark.end()):
            return mark.start()
    raise DataError(f"the value {shown(text[place : place + 40])} is not closed")
