r"""Reads an expression with latex2sympy, and decides whether two have the same value by evaluating them at points.

Sympy's ``simplify`` may take minutes for two expressions that differ; two that differ have other values at some point.
The points are whole numbers, numbers between 0 and 1, positive and negative ones, so that an identity of integers, of
angles or of real numbers is seen. A point where a value is not defined says nothing.
"""

import functools
import random
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any, ParamSpec, TypeAlias, TypeVar

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
from sympy.core.function import AppliedUndef

from gtpo_megatron.rewards.answers.numerals import Numeral, numeral, rounds_to

Value: TypeAlias = Any
"""An expression or a matrix of sympy, which has no types."""
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Default = TypeVar("Default")

DIGITS = 60
"""Decimal digits of an evaluation."""
TOLERANCE = sympy.Float("1e-40", DIGITS)
"""Relative difference of two equal numbers; what an evaluation loses is far less."""
TOLERANCE_AT_POINTS = sympy.Float("1e-25", DIGITS)
"""The same where numbers stand for symbols, which may cancel."""
_ZERO_AT_POINTS = sympy.Float("1e-40", DIGITS)
"""What is left of numbers of about 1 that cancel."""
_WHOLE = (2, 3, 4, 5)
_MOST_POWERS = 3
"""Powers one above the other, such as ``x^{x^{x}}``; the exponent of a higher one would not fit into memory."""
_NOISE_BITS = 10
"""Sympy says in so few bits that it found no digit of a number: the number is 0."""

_CASE_SENSITIVE = ConversionConfig(lowercase_symbols=False)
_DECIMAL = re.compile(r"(?<![\w.])(\d+)\.(\d+)")
_PRIMES = re.compile(r"(\\[A-Za-z]+|[A-Za-z])\s*('+|\^\{?\\prime\}?)")
_CONSTANTS_WITH_INDEX = re.compile(r"(?<![A-Za-z\\])([eEI])\s*_\s*(?:(\w)|\{([^{}]*)\})")
"""Symbols whose letters alone would be constants."""
_PRODUCTS = (
    re.compile(r"(?<![\w}^_\\])(\d+)\s*(?=\()"),  # 2(3)
    re.compile(r"(\))\s*(?=[\d(]|\\frac|\\sqrt)"),  # (3)(4)
)
_ANGLES = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
_DEGREES = re.compile(r"(\d+|\{\\frac\{\d+\}\{\d+\}\})\s*\^\s*\\circ")
"""Of an angle in a function; elsewhere a degree is a unit."""
_OPAQUE = (AppliedUndef, sympy.Derivative)


def safely(*, otherwise: Default) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result | Default]]:
    """Makes a function of expressions return this where the parser or sympy raises, which raise anything.

    Complex numbers have no order, a number and a matrix no sum: answers that cannot be compared are not equal.
    """

    def made(function: Callable[Arguments, Result]) -> Callable[Arguments, Result | Default]:
        @functools.wraps(function)
        def guarded(*arguments: Arguments.args, **named: Arguments.kwargs) -> Result | Default:
            try:
                return function(*arguments, **named)
            except Exception:  # noqa: BLE001 - see above; what ends a comparison that takes too long is no Exception
                return otherwise

        return guarded

    return made


def prepared(text: str) -> str:
    """The text with what latex2sympy reads in another way: exact decimals, products without a sign, primes."""
    text = _DECIMAL.sub(lambda found: f"{{\\frac{{{found[1]}{found[2]}}}{{1{'0' * len(found[2])}}}}}", text)
    if _ANGLES.search(text):
        text = _DEGREES.sub(r"{\\frac{\1\\pi}{180}}", text)
    text = _CONSTANTS_WITH_INDEX.sub(lambda found: f"\\variable{{{found[1]}_{{{found[2] or found[3]}}}}}", text)
    for product in _PRODUCTS:
        text = product.sub(r"\1\\cdot ", text)
    return _PRIMES.sub(lambda found: f"\\variable{{{found[1].strip(chr(92))}prime{len(found[2])}}}", text)


@functools.lru_cache(maxsize=4096)
@safely(otherwise=None)
def expression(text: str) -> Value | None:
    """The expression of a normalised text; None if it is none."""
    if (number := numeral(text)) is not None and not number.is_percent:
        return sympy.Rational(number.value.numerator, number.value.denominator)
    found = latex2sympy(prepared(text), is_real=True, normalization_config=None, conversion_config=_CASE_SENSITIVE)
    if not isinstance(found, (sympy.Expr, sympy.MatrixBase, sympy.MatrixExpr)):
        return None
    return _evaluable(found)


def _evaluable(found: Value) -> Value:
    """The expression with the imaginary unit in place of the letter i, and without what sympy cannot evaluate."""
    letters = {one: sympy.I for one in found.free_symbols if one.name == "i"}
    opaque: dict[Value, Value] = {}
    if isinstance(found, sympy.Basic):
        found = found.replace(
            lambda part: isinstance(part, sympy.Derivative) and part.expr.has(*part.variables), _derived
        )
        opaque = {part: sympy.Symbol(str(part), real=True) for part in found.atoms(*_OPAQUE)}
    return found.xreplace({**letters, **opaque}) if letters or opaque else found


def _derived(derivative: sympy.Derivative) -> sympy.Expr:
    return derivative.doit()


@safely(otherwise=False)
def same_value(one: Value, other: Value) -> bool:
    """Whether two expressions have the same value wherever both have one."""
    if one == other:
        return not one.has(sympy.nan, sympy.zoo)
    if not (one.free_symbols or other.free_symbols):
        return _same_number(one, other)
    if _same_at_points(one, other):
        return True
    folded = _folded(one), _folded(other)
    return None not in folded and folded != (one, other) and _same_at_points(*folded)


@safely(otherwise=False)
def same_decimal(decimal: Numeral, value: Value) -> bool:
    """Whether a number with a decimal point is this value, rounded to its last digit; it needs enough digits."""
    if value.free_symbols:
        return False
    number = _number(value)
    if number is None or not number.is_real:
        return False
    return rounds_to(decimal, Fraction(str(number)))


@safely(otherwise=False)
def is_about(number: Numeral, value: Value) -> bool:
    """Whether a number, of any length, is not this value but is it when rounded, or cut, to the number's last digit."""
    if value.free_symbols or (found := _number(value)) is None or not found.is_real:
        return False
    exact, hundred = Fraction(str(found)), 100 if number.is_percent else 1
    place = number.last_place or Fraction(10) ** _trailing_zeros(number.value)
    written, place = number.value / hundred, place / hundred
    is_cut = abs(written) <= abs(exact) < abs(written) + place and written * exact >= 0
    return written != exact and (is_cut or abs(written - exact) <= place / 2)


def _trailing_zeros(number: Fraction) -> int:
    digits = str(number)
    return len(digits) - len(digits.rstrip("0")) if number and digits.lstrip("-").isdecimal() else 0


@safely(otherwise=False)
def same_equation(one: tuple[Value, Value], other: tuple[Value, Value], *, is_directed: bool = False) -> bool:
    """Whether two equations, or inequalities in one direction, are the same but for a factor.

    Args:
        one: left and right side.
        other: left and right side.
        is_directed: whether the factor must be positive.
    """
    first, second = one[0] - one[1], other[0] - other[1]
    if not (first.free_symbols and second.free_symbols):
        return False  # of two numbers each is a multiple of the other
    if _is_same_up_to_factor(first, second, is_directed=is_directed):
        return True
    if is_directed:
        return False
    above = [sympy.fraction(sympy.together(sympy.expand(side)))[0] for side in (first, second)]
    return _is_same_up_to_factor(*above, is_directed=False)


def _is_same_up_to_factor(first: Value, second: Value, *, is_directed: bool) -> bool:
    factor: sympy.Expr | None = None
    num = 0
    for a, b in _at_points(first, second):
        if _is_nothing(a) and _is_nothing(b):
            continue
        if _is_nothing(a) or _is_nothing(b):
            return False
        ratio = a / b
        if factor is not None and not _is_close(ratio, factor, TOLERANCE_AT_POINTS):
            return False
        factor, num = ratio, num + 1
    return factor is not None and num > 1 and (not is_directed or bool(factor.is_real and factor > 0))


def _is_nothing(value: sympy.Expr) -> bool:
    return bool(abs(value) < _ZERO_AT_POINTS)


def _same_number(one: Value, other: Value) -> bool:
    """Compares two expressions without symbols, exactly if both are rational."""
    if isinstance(one, sympy.MatrixBase | sympy.MatrixExpr) or isinstance(other, sympy.MatrixBase | sympy.MatrixExpr):
        return _same_entries(one, other, _same_number)
    a, b = _number(one), _number(other)
    if a is None or b is None:
        return False
    if (a.is_Rational and b.is_Rational) or sympy.oo in (abs(a), abs(b)):
        return bool(a == b)
    return _is_close(a, b, TOLERANCE)


def _number(value: Value) -> sympy.Expr | None:
    """The rational number, or ``DIGITS`` digits of what is none; None if it is undefined."""
    with_value = value.doit()
    if with_value.is_Rational or with_value in (sympy.oo, -sympy.oo):
        return with_value
    found = with_value.evalf(DIGITS)
    if not found.is_number or found.has(sympy.nan, sympy.zoo, sympy.oo):
        return None
    real, imaginary = found.as_real_imag()
    if not (real.is_Number and imaginary.is_Number):
        return None
    return _without_noise(real) + sympy.I * _without_noise(imaginary)


def _without_noise(part: sympy.Expr) -> sympy.Expr:
    is_noise = isinstance(part, sympy.Float) and part._prec < _NOISE_BITS
    return sympy.Integer(0) if is_noise else part


def _is_close(a: sympy.Expr, b: sympy.Expr, tolerance: sympy.Float) -> bool:
    return bool(abs(a - b) <= tolerance * max(abs(a), abs(b)))


def _same_entries(one: Value, other: Value, is_same: Callable[[Value, Value], bool]) -> bool:
    """Compares two matrices entry by entry."""
    a, b = one.doit(), other.doit()
    if not (isinstance(a, sympy.MatrixBase) and isinstance(b, sympy.MatrixBase)):
        return False
    return a.shape == b.shape and all(is_same(x, y) for x, y in zip(a, b, strict=True))


def _same_at_points(one: Value, other: Value) -> bool:
    """Whether two expressions agree at every point where both are defined; at real ones, if there are any."""
    pairs = list(_at_points(one, other))
    real = [pair for pair in pairs if all(value.is_real for value in pair)]
    compared = real or pairs
    return len(compared) > 1 and all(
        _is_close(a, b, TOLERANCE_AT_POINTS) or (_is_nothing(a) and _is_nothing(b)) for a, b in compared
    )


def _points(num: int) -> Iterator[list[sympy.Expr]]:
    """Values for the symbols: whole numbers, numbers between 0 and 1, positive and negative ones.

    Whole numbers are floats too, so that a large power of one is not written out; and small, so that a power of powers
    has an exponent that fits.
    """
    drawn = random.Random(32)
    for _ in range(2):
        whole = [drawn.randint(2, 5) for _ in range(num)] if num > len(_WHOLE) else drawn.sample(_WHOLE, k=num)
        yield [sympy.Float(value, DIGITS) for value in whole]
        for low, high in ((0.1, 0.9), (1.2, 4.0), (-3.0, -0.2)):
            yield [sympy.Float(str(round(drawn.uniform(low, high), 9)), DIGITS) for _ in range(num)]


def _at_points(one: Value, other: Value) -> Iterator[tuple[sympy.Expr, sympy.Expr]]:
    """Pairs of values of two expressions at the same points; of matrices, of each of their entries."""
    symbols = sorted(one.free_symbols | other.free_symbols, key=lambda symbol: symbol.name)
    if max(_height(one), _height(other)) > _MOST_POWERS:
        return
    for point in _points(len(symbols)):
        values = dict(zip(symbols, point, strict=True))
        a, b = _at(one, values), _at(other, values)
        if len(a) != len(b):
            yield sympy.Integer(0), sympy.Integer(1)  # a matrix of another shape
            return
        yield from ((x, y) for x, y in zip(a, b, strict=True) if x is not None and y is not None)


def _at(found: Value, values: dict[sympy.Symbol, sympy.Expr]) -> list[sympy.Expr | None]:
    """The value at a point, or of a matrix all of its entries; None where it is not defined."""
    if found.has(sympy.Sum, sympy.Product):
        if not all(float(value).is_integer() for value in values.values()):
            return [None]  # a sum to a bound that is no integer
        values = {symbol: sympy.Integer(value) for symbol, value in values.items()}
    try:
        value = found.xreplace(values).doit()
        entries = list(value) if isinstance(value, sympy.MatrixBase) else [value]
        return [_number(entry) for entry in entries]
    except Exception:  # noqa: BLE001 - sympy raises anything where a function is not defined
        return [None]


def _height(found: Value) -> int:
    """The largest number of powers one above the other that are not numbers."""
    if not found.free_symbols:
        return 0
    inner = max(map(_height, found.args), default=0)
    if isinstance(found, sympy.Pow | sympy.exp | sympy.factorial):
        return max(inner, 1 + _height(found.args[-1]))
    return inner


def _folded(found: Value) -> Value | None:
    """The expression in lower case, as ``C_1`` and ``c_1`` mean one constant; None if it has both cases of a letter."""
    lower: dict[sympy.Symbol, sympy.Symbol] = {
        symbol: sympy.Symbol(symbol.name.lower(), real=True) for symbol in found.free_symbols
    }
    return found.xreplace(lower) if len(set(lower.values())) == len(lower) else None
