"""What a call has returned, as JSON, which is compared outside; runs inside the sandbox, on the standard library."""

import json
from collections import deque
from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from decimal import Decimal
from fractions import Fraction
from math import isnan
from numbers import Number
from typing import Any

from gtpo_megatron.sandbox.inside.nodes import unbuilt

ITERATED: tuple[Any, ...] = (Iterator, range, deque, KeysView, ValuesView, ItemsView)
"""What is taken for the list of what it yields: generators, ``map``, ``zip`` and the like are iterators."""

NOTHING = float("nan")
"""Stands for a value that equals nothing that JSON can say."""


def as_json(value: Any, kind: str = "") -> str:
    """A returned value as JSON: tuples and what can be iterated are lists, sets are sorted, nodes are unbuilt.

    Exact numbers are integers or floats; other objects are their text.

    Args:
        value: a value of the program.
        kind: kind of the function's result, see :mod:`.nodes`.
    """
    return json.dumps(unbuilt(value, kind), default=_plain)


def _plain(one: Any) -> Any:
    if isinstance(one, set | frozenset):
        return _sorted(one)
    if type(one).__module__ == "numpy" and hasattr(one, "tolist"):
        return one.tolist()
    if isinstance(one, Decimal | Fraction):
        return _number(one)
    if isinstance(one, ITERATED):
        return list(one)
    found = unbuilt(one)
    return repr(one) if found is one else found


def _sorted(values: Any) -> list[Any]:
    try:
        return sorted(values)
    except TypeError:  # values of several types have no order
        return list(values)


def _number(one: Any) -> Any:
    """A Decimal or a Fraction as the integer that it is, or the nearest float."""
    try:
        is_whole = one.denominator == 1 if isinstance(one, Fraction) else one.is_finite() and one == one.to_integral()
        return int(one) if is_whole else float(one)
    except (ArithmeticError, ValueError):  # beyond all floats, or a signalling nan
        return repr(one)


def as_exact_json(value: Any) -> str:
    """A returned value for a comparison as Python's ``==`` makes it with a value of JSON.

    A tuple as a whole is a list. What equals no value of JSON (a tuple or set in it, a generator, a dictionary by
    numbers, an object) is nan, which equals nothing.
    """
    return json.dumps(_exact(list(value) if isinstance(value, tuple) else value))


def _exact(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list):
        return [_exact(one) for one in value]
    if isinstance(value, dict):
        is_by_text = all(isinstance(key, str) for key in value)
        return {key: _exact(one) for key, one in value.items()} if is_by_text else NOTHING
    if isinstance(value, int | float):
        return value
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # of numpy, whose truth values are no numbers
        return value.item()
    return _equal_number(value) if isinstance(value, Number) else NOTHING


def _equal_number(value: Any) -> Any:
    """The integer or float that equals a number of another type; else nan."""
    for kind in (int, float):
        try:
            found = kind(value.real if isinstance(value, complex) else value)
        except (ArithmeticError, ValueError, TypeError):
            continue
        if found == value and not isnan(found):
            return found
    return NOTHING
