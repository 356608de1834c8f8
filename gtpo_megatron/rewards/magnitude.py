r"""Finds numbers that are too large to compute, such as ``10^{10^{10}}``, before they are parsed."""

import math
import re
from collections.abc import Callable

MAX_DIGITS = 10_000
"""Largest number of digits of a power or factorial; sympy computes these in milliseconds."""

_NUMBER = r"(?:\d++(?:\.\d*+)?|\.\d++)"
"""Possessive and anchored, so that matching takes linear time."""
_POWER = re.compile(
    rf"(?<![\d.])({_NUMBER}|\({_NUMBER}\)|\{{{_NUMBER}\}})(?:\^|\*\*)([-+]?)"
    r"(\d++|\{\(?[-+]?\d++\)?\}|\([-+]?\d++\))(?![\d^(*!]|\*\*)"
)
_FACTORIAL = re.compile(r"(?<![\d.])(\d++|\(\d++\)|\{\d++\})!")
_SPACE = re.compile(r"\s+|\\[,;:! ]|\\left|\\right|(?<=\d),(?=\d{3})")
_LARGEST_ARGUMENT = 3_249
"""Its factorial has 10,000 digits."""
_EXACT_DIGITS = 15
"""Decimal digits of a float."""


def is_too_large(text: str) -> bool:
    r"""Whether a power or a factorial of plain numbers in LaTeX text has more than ``MAX_DIGITS`` digits.

    Powers and factorials are evaluated from the inside out, including towers and factorials of powers. Expressions with
    a symbol, or with a sum in an exponent, are not evaluated: the caller's time limit applies to them.
    """
    text = _SPACE.sub("", text)
    for _ in range(len(text)):
        found = _POWER.search(text) or _FACTORIAL.search(text)
        if found is None:
            return False
        value = _power(found) if found.re is _POWER else _factorial(found)
        if value is None:
            return True
        text = f"{text[: found.start()]}{value}{text[found.end() :]}"
    return False


def _power(found: re.Match[str]) -> str | None:
    """The approximate value as text; None if it is too large."""
    base, exponent = found[1].strip("(){}"), found[3].strip("(){}")
    digits = _log10(base)
    if digits is None or digits == 0.0:  # 0 or 1
        return "1"
    times = exponent.lstrip("+-")
    if len(times) > _EXACT_DIGITS or abs(digits) * int(times) > MAX_DIGITS:
        return None
    if digits < 0 or "-" in (found[2], exponent[:1]):
        return "1"  # a fraction: no tower grows on it
    return _written(digits * int(times), exact=lambda: round(float(base) ** int(times)))


def _factorial(found: re.Match[str]) -> str | None:
    argument = found[1].strip("(){}")
    if len(argument) > _EXACT_DIGITS or int(argument) > _LARGEST_ARGUMENT:
        return None
    return _written(math.lgamma(int(argument) + 1) / math.log(10), exact=lambda: math.factorial(int(argument)))


def _log10(number: str) -> float | None:
    """Logarithm of a decimal of any length; None for 0."""
    whole, _, rest = number.partition(".")
    if len(whole := whole.lstrip("0")) > _EXACT_DIGITS:
        return len(whole) - _EXACT_DIGITS + math.log10(int(whole[:_EXACT_DIGITS]))
    value = float(f"{whole or 0}.{rest[: 2 * _EXACT_DIGITS] or 0}")
    return math.log10(value) if value else None


def _written(digits: float, *, exact: Callable[[], int]) -> str:
    """The exact number if it is short, else a number of the same length."""
    return str(exact()) if digits < _EXACT_DIGITS else "9" * math.ceil(digits)
