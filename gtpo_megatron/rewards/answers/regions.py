r"""Sets of real numbers: intervals, their unions, and the solutions of inequalities."""

from collections.abc import Callable
from dataclasses import dataclass

import sympy

from gtpo_megatron.rewards.answers.expressions import Value, safely, same_value
from gtpo_megatron.rewards.answers.nodes import Bracketed, Leaf, Listing, Node, Relation, SetOperation

ValueOf = Callable[[Node], Value]

_SETS = {
    r"\mathbb{R}": sympy.S.Reals,
    r"\emptyset": sympy.S.EmptySet,
    r"\mathbb{Z}": sympy.S.Integers,
    r"\mathbb{N}": sympy.S.Naturals,
    r"\mathbb{Q}": sympy.S.Rationals,
    r"\mathbb{C}": sympy.S.Complexes,
}
_RELATIONS = {"<": sympy.Lt, ">": sympy.Gt, r"\leq": sympy.Le, r"\geq": sympy.Ge, "=": sympy.Eq, r"\neq": sympy.Ne}
_PAIR = 2
_MOST_OPERATIONS = 40
"""Operations of an inequality that is solved; a longer one is compared by its sides only."""


@dataclass(frozen=True, slots=True)
class Region:
    """A set and the symbol that it is of, if it has one."""

    points: sympy.Set
    symbol: str = ""


@safely(otherwise=None)
def region(node: Node, value_of: ValueOf) -> Region | None:
    """The set of real numbers that an answer is; None if it is none, or one that would take long."""
    return _region(node, value_of)


@safely(otherwise=False)
def regions_equal(one: Region, other: Region) -> bool:
    """Whether two sets have the same points and no different symbols."""
    if one.symbol and other.symbol and one.symbol != other.symbol:
        return False
    if one.points == other.points:
        return True
    left, right = _pieces(one.points), _pieces(other.points)
    if left is None or right is None or len(left) != len(right):
        return False
    for piece in left:  # disjoint, so each equals at most one; not sorted, as not all numbers have an order
        found = next((index for index, candidate in enumerate(right) if _piece_equal(piece, candidate)), None)
        if found is None:
            return False
        del right[found]
    return True


def _pieces(points: sympy.Set) -> list[sympy.Set] | None:
    """Intervals and single points; None for another set."""
    parts = points.args if isinstance(points, sympy.Union) else (points,)
    flat: list[sympy.Set] = []
    for part in parts:
        if isinstance(part, sympy.FiniteSet):
            flat += [sympy.FiniteSet(point) for point in part]
        elif isinstance(part, sympy.Interval):
            flat.append(part)
        else:
            return None
    return flat


def _piece_equal(one: sympy.Set, other: sympy.Set) -> bool:
    if isinstance(one, sympy.Interval) and isinstance(other, sympy.Interval):
        sides = (one.left_open, one.right_open) == (other.left_open, other.right_open)
        return sides and same_value(one.start, other.start) and same_value(one.end, other.end)
    if isinstance(one, sympy.FiniteSet) and isinstance(other, sympy.FiniteSet):
        return same_value(*one.args, *other.args)
    return False


def _region(node: Node, value_of: ValueOf) -> Region | None:
    match node:
        case Leaf():
            points = _SETS.get(node.text)
            return None if points is None else Region(points)
        case Bracketed():
            return _interval(node, value_of)
        case Relation():
            return _solutions(node, value_of)
        case SetOperation():
            return _joined([_region(part, value_of) for part in node.parts], list(node.signs))
        case Listing() if node.is_set or not all(
            isinstance(item, Relation | Bracketed | SetOperation) for item in node.items
        ):
            values = [value_of(item) for item in node.items]
            return None if any(value is None for value in values) else Region(sympy.FiniteSet(*values))
        case Listing():
            sign = r"\cap" if node.is_and else r"\cup"
            return _joined([_region(item, value_of) for item in node.items], [sign] * (len(node.items) - 1))
    return None


def _interval(node: Bracketed, value_of: ValueOf) -> Region | None:
    is_opened, is_closed = node.left in ("(", "["), node.right in (")", "]")
    values = [value_of(item) for item in node.items]
    if len(values) != _PAIR or any(value is None for value in values) or not (is_opened and is_closed):
        return None
    start, end = values
    if start.is_comparable and end.is_comparable and not start < end:
        return None
    return Region(sympy.Interval(start, end, left_open=node.left == "(", right_open=node.right == ")"))


def _joined(parts: list[Region | None], signs: list[str]) -> Region | None:
    symbols = {part.symbol for part in parts if part is not None and part.symbol}
    if None in parts or len(symbols) > 1:
        return None
    found = parts[0].points  # type: ignore[union-attr]
    for sign, part in zip(signs, parts[1:], strict=True):
        points = part.points  # type: ignore[union-attr]
        match sign:
            case r"\cup":
                found = found | points
            case r"\cap":
                found = found & points
            case _:
                found = found - points
    return Region(found, next(iter(symbols), ""))


def _solutions(node: Relation, value_of: ValueOf) -> Region | None:
    r"""The solutions of inequalities in one symbol; of ``x \in S``, the set."""
    if node.signs == (r"\in",):
        inner, symbol = _region(node.sides[1], value_of), value_of(node.sides[0])
        return Region(inner.points, str(symbol)) if inner is not None and isinstance(symbol, sympy.Symbol) else None
    if r"\in" in node.signs:
        return None
    values = [value_of(side) for side in node.sides]
    if any(not isinstance(value, sympy.Expr) for value in values):
        return None
    symbols = {symbol for value in values for symbol in value.free_symbols}
    if len(symbols) != 1 or sum(value.count_ops() for value in values) > _MOST_OPERATIONS:
        return None
    [symbol] = symbols
    found: sympy.Set = sympy.S.Reals
    for sign, left, right in zip(node.signs, values, values[1:]):  # noqa: B905 - neighbours
        found = found & _solution(sign, left, right, symbol)
    return Region(found, symbol.name)


def _solution(sign: str, left: Value, right: Value, symbol: sympy.Symbol) -> sympy.Set:
    if sign == "=":
        return sympy.solveset(left - right, symbol, sympy.S.Reals)
    holds = _RELATIONS[sign](left.doit(), right.doit())
    if holds in (sympy.true, sympy.false):
        return sympy.S.Reals if holds == sympy.true else sympy.S.EmptySet
    return holds.as_set()
