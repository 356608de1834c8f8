"""Strict readers of JSON and JSON lines.

They refuse repeated keys, integers of more than ``MAX_DIGITS`` digits, nesting deeper than ``MAX_DEPTH``, unpaired
surrogates and every encoding but UTF-8. ``NaN`` and ``1e999`` are refused by ``fields.py`` if a number is read.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gtpo_megatron.errors import DataError, GTPOError
from gtpo_megatron.untrusted.text import decoded, find_bytes, numbered_lines, printable, read_bytes, shown

MAX_DEPTH = 64
MAX_DIGITS = 300
"""Digits of an integer; larger ones overflow float64."""

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class _RefusedError(ValueError):
    """Raised by decoder hooks; ``parse_json`` converts it to the caller's error."""


def parse_json(
    text: str | bytes, place: str, *, error: type[GTPOError] = DataError, half_pairs: bool = False
) -> object:
    """Parses a text.

    Args:
        text: text of a file or of a line.
        place: place for messages: a file, or ``file:line``.
        error: class of errors raised.
        half_pairs: allow unpaired surrogates, which sampled texts may contain.

    Raises:
        GTPOError: ``error``: it is not JSON, or JSON that is refused.
    """
    if isinstance(text, bytes):
        text = decoded(text, place, error)
    try:
        value = _DECODER.decode(text)
        if text.count("[") + text.count("{") > MAX_DEPTH:
            _check_depth(value)
        if not half_pairs and _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as problem:
        where = f"column {problem.colno}" if problem.lineno == 1 else f"line {problem.lineno} column {problem.colno}"
        raise error(f"{place}: not valid JSON: {problem.msg} at {where}") from problem
    except UnicodeEncodeError as problem:
        raise error(f"{place}: not valid JSON: holds half a surrogate pair, which is no character") from problem
    except RecursionError as problem:
        raise error(f"{place}: not valid JSON: nested more than {MAX_DEPTH} deep") from problem
    except _RefusedError as problem:
        raise error(f"{place}: not valid JSON: {problem}") from problem
    return value


def json_span(text: str, start: int) -> tuple[int, bool]:
    """Where the JSON value that begins at a place ends, and True; or where it stops to be JSON, and False.

    What :func:`parse_json` refuses for another reason than its syntax has an end, too.
    """
    try:
        return _ANY_DECODER.raw_decode(text, start)[1], True
    except json.JSONDecodeError as problem:
        return max(start, problem.pos), False
    except RecursionError:
        return len(text), False


def read_json(path: Path, *, error: type[GTPOError] = DataError) -> object:
    """Parses a file.

    Raises:
        GTPOError: ``error``: no such file, or one that cannot be read, or as in :func:`parse_json`.
    """
    return parse_json(read_bytes(path, error=error), printable(path), error=error)


def find_json(path: Path, *, error: type[GTPOError] = DataError) -> object:
    """Like :func:`read_json`; None if there is no such file, or if it contains ``null``."""
    content = find_bytes(path, error=error)
    return None if content is None else parse_json(content, printable(path), error=error)


def read_json_lines(path: Path, *, error: type[GTPOError] = DataError) -> Iterator[tuple[str, object]]:
    """Yields the values of a file of JSON lines with their places ``file:line``; blank lines are skipped.

    Raises:
        GTPOError: ``error``, as in :func:`read_json`.
    """
    name = printable(path)
    for number, line in numbered_lines(path, error=error):
        if line.strip():
            place = f"{name}:{number}"
            yield place, parse_json(line.strip(), place, error=error)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise _RefusedError(f"the key {shown(next(key for key in keys if keys.count(key) > 1))} is there twice")
    return found


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise _RefusedError(f"an integer of {len(text)} digits; the most is {MAX_DIGITS}")
    return int(text)


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_int=_integer)
_ANY_DECODER = json.JSONDecoder(parse_int=str)  # Python takes no integer of some thousand digits


def _check_depth(value: object) -> None:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for one in level
            if isinstance(one, dict | list)
            for child in (one.values() if isinstance(one, dict) else one)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise _RefusedError(f"nested more than {MAX_DEPTH} deep")
