"""Whether what a program has printed or returned is what a test expects.

There are two comparisons: ours, and that of LiveCodeBench's own grader, for its rows. docs/evaluation.md has a table of
where they differ.
"""

import json
import math
import re
from decimal import Decimal, InvalidOperation
from typing import Any

from gtpo_megatron.rewards.program_tests import LIVECODEBENCH, ProgramTest

RELATIVE_TOLERANCE = ABSOLUTE_TOLERANCE = 1e-6
"""Of floating-point numbers, in outputs and returned values."""

_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")

_NOTHING = object()
"""Stands for a returned value that is no JSON, which equals nothing."""


def compared(test: ProgramTest, given: str) -> str:
    """``passed``, or what is wrong with the output, or the returned value as JSON, of a program that ended well."""
    is_theirs = test.comparison == LIVECODEBENCH
    if test.output is not None:
        is_same = same_lines(test.output, given) if is_theirs else same_output(test.output, given)
        return "passed" if is_same else "wrong output"
    if test.value is not None:
        is_same = equal_value(test.value, given) if is_theirs else same_value(test.value, given)
        return "passed" if is_same else "wrong value"
    return "passed"


def same_output(expected: str, given: str) -> bool:
    """Whether two outputs have the same words line by line, with floats within the tolerance.

    White space between words does not count, as in most contests' checkers; empty lines do, but for the last ones.
    """
    wanted, found = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (expected, given))
    if wanted == found:
        return True
    wanted_words, found_words = ([line.split() for line in lines] for lines in (wanted, found))
    return [len(line) for line in wanted_words] == [len(line) for line in found_words] and all(
        _same_word(one, other)
        for line, other_line in zip(wanted_words, found_words, strict=True)
        for one, other in zip(line, other_line, strict=True)
    )


def _same_word(expected: str, given: str) -> bool:
    if expected == given:
        return True
    if not ("." in expected or "e" in expected.lower()):  # an integer must be given exactly
        return False
    if not (_NUMBER.fullmatch(expected) and _NUMBER.fullmatch(given)):
        return False
    return _is_close(float(expected), float(given))


def _is_close(one: float, other: float) -> bool:
    try:
        return math.isclose(one, other, rel_tol=RELATIVE_TOLERANCE, abs_tol=ABSOLUTE_TOLERANCE)
    except OverflowError:  # an integer beyond all floats
        return False


def same_value(expected: str, given: str) -> bool:
    """Equality of values of JSON with tolerance of floats; a list of one value also stands for the value itself.

    TACO and APPS write some returned values so, lists among them.
    """
    wanted, found = json.loads(expected), _value(given)
    return _equal(wanted, found) or (isinstance(wanted, list) and len(wanted) == 1 and _equal(wanted[0], found))


def _value(text: str) -> Any:
    try:
        # a constant, which is nan, is another object each time, so that it does not equal itself in a list
        return json.loads(text, parse_constant=float)
    except (ValueError, RecursionError):
        return _NOTHING


def _equal(expected: Any, given: Any) -> bool:
    if isinstance(expected, bool) or isinstance(given, bool):
        return expected is given
    if isinstance(expected, int | float) and isinstance(given, int | float):
        if isinstance(expected, float) and math.isnan(expected):
            return isinstance(given, float) and math.isnan(given)
        return expected == given or (isinstance(expected, float) and _is_close(expected, given))
    if isinstance(expected, list) and isinstance(given, list):
        return len(expected) == len(given) and all(map(_equal, expected, given))
    if isinstance(expected, dict) and isinstance(given, dict):
        return expected.keys() == given.keys() and all(_equal(expected[key], given[key]) for key in expected)
    return type(expected) is type(given) and bool(expected == given)


def same_lines(expected: str, given: str) -> bool:
    """LiveCodeBench's comparison of outputs: as many lines, each the same text or the same decimal numbers.

    White space around the whole and around each line does not count, and no tolerance is given.
    """
    wanted, found = ([line.strip() for line in text.strip().split("\n")] for text in (expected, given))
    return len(wanted) == len(found) and all(map(_same_line, wanted, found))


def _same_line(expected: str, given: str) -> bool:
    if expected == given:
        return True
    try:
        return [Decimal(word) for word in expected.split()] == [Decimal(word) for word in given.split()]
    except InvalidOperation:  # a word that is no number
        return False


def equal_value(expected: str, given: str) -> bool:
    """LiveCodeBench's comparison of returned values: Python's ``==``, for which 1 is True and 3.0 is 3."""
    return bool(json.loads(expected) == _value(given))
