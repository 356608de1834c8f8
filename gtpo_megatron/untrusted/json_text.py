"""JSON and JSON lines: what ``json.loads`` takes without a word, or leaves as another error than one line, is refused.

Refused are repeated keys, integers of more than ``MAX_DIGITS`` digits, brackets deeper than ``MAX_DEPTH``, half
surrogate pairs (no text that could be written again) and every encoding but UTF-8. ``NaN``, which data frames write for
what is missing, and ``1e999`` are refused where a number is asked for, see ``fields.py``.
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
"""Of an integer; one of more is no float, and Python refuses to read or write thousands."""

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class _RefusedError(ValueError):
    """Of a hook; ``parse_json`` makes the caller's error of it."""


def parse_json(
    text: str | bytes, place: str, *, error: type[GTPOError] = DataError, half_pairs: bool = False
) -> object:
    """The value that a text holds.

    Args:
        text: of a file or of a line.
        place: named in errors: a file, or ``file:line``.
        error: to raise.
        half_pairs: take half surrogate pairs: in texts that a model has sampled.

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


def read_json(path: Path, *, error: type[GTPOError] = DataError) -> object:
    """The value that a file holds.

    Raises:
        GTPOError: ``error``: no such file, or one that cannot be read, or as in :func:`parse_json`.
    """
    return parse_json(read_bytes(path, error=error), printable(path), error=error)


def find_json(path: Path, *, error: type[GTPOError] = DataError) -> object:
    """As :func:`read_json`; None where there is no such file, as where it holds ``null``."""
    content = find_bytes(path, error=error)
    return None if content is None else parse_json(content, printable(path), error=error)


def read_json_lines(
    path: Path, *, error: type[GTPOError] = DataError, half_pairs: bool = False
) -> Iterator[tuple[str, object]]:
    """The values of a file with one a line, each with its place ``file:line``; blank lines are passed over.

    Raises:
        GTPOError: ``error``, as in :func:`read_json`.
    """
    name = printable(path)
    for number, line in numbered_lines(path, error=error):
        if line.strip():
            place = f"{name}:{number}"
            yield place, parse_json(line.strip(), place, error=error, half_pairs=half_pairs)


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
