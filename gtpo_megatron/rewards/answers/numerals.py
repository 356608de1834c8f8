r"""Numbers that are read without a parser.

``4.5 \times 10^{33}``, ``-\frac{1}{2}``, ``1 1/2``, ``50\%``, ``204_5``.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

SIGNIFICANT_DIGITS = 6
"""A decimal with as many is taken for the number that it rounds, such as 0.333333 for 1/3."""

_UNSIGNED = r"\d+(?:\.\d+)?"
_SIGNED = rf"[-+]?{_UNSIGNED}"
_LARGEST_EXPONENT = 5_000
_LITERAL = re.compile(
    rf"(?P<sign>[-+]?)\s*(?:"
    rf"(?P<mixed>\d+)\s*(?:\s(?P<over>\d+)\s*/\s*(?P<under>\d+)|\\frac\{{(?P<mover>\d+)\}}\{{(?P<munder>\d+)\}})"
    rf"|\\frac\{{\s*(?P<above>{_SIGNED})\s*\}}\{{\s*(?P<below>{_SIGNED})\s*\}}"
    rf"|(?P<left>{_UNSIGNED})\s*/\s*(?P<right>{_UNSIGNED})"
    rf"|(?P<digits>{_UNSIGNED})(?:\s*\\(?:times|cdot)\s*10\^\{{\s*(?P<exponent>[-+]?\d{{1,5}})\s*\}})?"
    rf"|10\^\{{\s*(?P<power>[-+]?\d{{1,5}})\s*\}}"
    rf")\s*(?:(?P<percent>\\%)|\^\s*\\circ)?"
)
_NUMBER_WORDS = [
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
]
_BASES = {word: number for number, word in enumerate(_NUMBER_WORDS, start=2)}
_IN_BASE = re.compile(
    r"(?P<open>\()?\s*(?P<digits>[0-9][0-9A-Za-z]*|[A-F][0-9A-F]+)\s*(?(open)\))\s*"
    r"(?:_\s*(?:\{\s*)?\(?(?:\\text\{\s*)?\(?(?:base )?(?P<base>\d+|[a-z]+)\s*\)?\s*\}?\)?\s*\}?"
    r"|(?:\\text\{)?\s*\(?(?:in )?base[- ](?P<named>\d+|[a-z]+)\)?\s*\}?)"
)

_DIGITS_IN_TEXT = re.compile(r"\\text\{\s*([0-9A-Za-z]+)\s*\}")


@dataclass(frozen=True, slots=True)
class Numeral:
    """A number as it is written.

    Attributes:
        value: exactly what is written.
        last_place: value of one unit of the last digit; None for a number without a decimal point, which is exact.
        digits: significant digits.
        is_percent: whether it is written with a percent sign; ``value`` is the number before it.
        base: base that it is written in.
    """

    value: Fraction
    last_place: Fraction | None = None
    digits: int = 0
    is_percent: bool = False
    base: int = 10


def numeral(text: str) -> Numeral | None:
    """The number of a normalised text; None if it is anything else."""
    found = _LITERAL.fullmatch(text)
    if found is None:
        return None
    sign = -1 if found["sign"] == "-" else 1
    is_percent = found["percent"] is not None
    if found["digits"] is not None:
        return _decimal(found["digits"], int(found["exponent"] or 0), sign, is_percent=is_percent)
    if found["power"] is not None:
        return _decimal("1", int(found["power"]), sign, is_percent=is_percent)
    whole = Fraction(found["mixed"] or 0)
    above = found["above"] or found["left"] or found["over"] or found["mover"]
    below = Fraction(found["below"] or found["right"] or found["under"] or found["munder"])
    if not below:
        return None
    return Numeral(sign * (whole + Fraction(above) / below), is_percent=is_percent)


def _decimal(digits: str, exponent: int, sign: int, *, is_percent: bool) -> Numeral | None:
    if abs(exponent) > _LARGEST_EXPONENT:
        return None
    whole, point, places = digits.partition(".")
    scale = Fraction(10) ** exponent
    return Numeral(
        value=sign * Fraction(digits) * scale,
        last_place=scale / 10 ** len(places) if point else None,
        digits=len((whole + places).lstrip("0")),
        is_percent=is_percent,
    )


def numeral_in_base(text: str) -> Numeral | None:
    """The number of a text such as ``204_5`` or ``204 base 5``; None if it is none, or the base lacks a digit."""
    found = _IN_BASE.fullmatch(_DIGITS_IN_TEXT.sub(r"\1", text))
    name = (found["base"] or found["named"]) if found else ""
    base = _BASES.get(name) or (int(name) if name.isdigit() and len(name) < 3 else 0)
    if found is None or not 2 <= base <= 36:
        return None
    try:
        return Numeral(Fraction(int(found["digits"], base)), base=base)
    except ValueError:
        return None


def numerals_equal(reference: Numeral, given: Numeral) -> bool:
    """Whether two written numbers are the same.

    Numbers without a decimal point are compared exactly. A decimal equals what it rounds if it has at least
    ``SIGNIFICANT_DIGITS``. A reference in another base needs that base; a percent sign may be left out of numbers from
    1 on, and is a hundredth otherwise.
    """
    if reference.base not in (10, given.base):
        return False
    if reference.is_percent and given.is_percent:
        return _rounds(reference, given)
    return any(_rounds(one, other) for one in _values(reference) for other in _values(given))


def rounds_to(decimal: Numeral, value: Fraction) -> bool:
    """Whether a decimal with enough digits is this value, rounded to its last digit."""
    if decimal.value == value:
        return True
    if decimal.last_place is None or decimal.digits < SIGNIFICANT_DIGITS:
        return False
    return abs(decimal.value - value) <= decimal.last_place / 2


def _rounds(one: Numeral, other: Numeral) -> bool:
    if one.value == other.value:
        return True
    if one.last_place is not None and other.last_place is not None:
        coarse, fine = (one, other) if one.last_place >= other.last_place else (other, one)
        return coarse.last_place != fine.last_place and rounds_to(coarse, fine.value)
    return rounds_to(one, other.value) or rounds_to(other, one.value)


def _values(number: Numeral) -> list[Numeral]:
    """The readings of a percent sign: a hundredth, and of numbers from 1 on also nothing."""
    if not number.is_percent:
        return [number]
    place = None if number.last_place is None else number.last_place / 100
    hundredth = Numeral(number.value / 100, place, number.digits)
    plain = Numeral(number.value, number.last_place, number.digits)
    return [hundredth, plain] if abs(number.value) >= 1 or not number.value else [hundredth]
