r"""Decides whether a given answer equals the reference, part by part of their structure."""

import re
from collections.abc import Sequence

import sympy

from gtpo_megatron.rewards.answers import regions
from gtpo_megatron.rewards.answers.expressions import (
    Value,
    expression,
    safely,
    same_decimal,
    same_equation,
    same_value,
)
from gtpo_megatron.rewards.answers.numerals import Numeral, numeral, numeral_in_base, numerals_equal
from gtpo_megatron.rewards.answers.reading import (
    Bracketed,
    Leaf,
    Listing,
    Matrix,
    Node,
    Relation,
    SetOperation,
    is_name,
)
from gtpo_megatron.rewards.answers.units import without_letter

_WORDS = re.compile(r"\\text\{|[A-Za-z]{4,}|[A-Za-z]{2,}[ -]+[A-Za-z]{2,}")
_FLIPPED = {"<": ">", ">": "<", r"\leq": r"\geq", r"\geq": r"\leq", "=": "=", r"\neq": r"\neq"}
_PAIR = 2


def equal(reference: Node, given: Node) -> bool:
    """Whether the given answer is right. Not symmetric: a name may be left out, and added, but not changed."""
    if reference == given:
        return True
    reference, given = _without_one_item(reference), _without_one_item(given)
    if isinstance(reference, Relation) or isinstance(given, Relation):
        return _relations_equal(reference, given)
    if isinstance(reference, SetOperation) or isinstance(given, SetOperation):
        return _regions_equal(reference, given)
    if isinstance(reference, Listing) or isinstance(given, Listing):
        return _listings_equal(reference, given) or _regions_equal(reference, given)
    match reference, given:
        case Leaf(), Leaf():
            return leaves_equal(reference.text, given.text)
        case Matrix(), Matrix():
            return len(reference.rows) == len(given.rows) and all(
                _in_order(a, b) for a, b in zip(reference.rows, given.rows, strict=True)
            )
        case Bracketed(), Bracketed():
            return _brackets_equal(reference, given)
        case (Leaf(), Bracketed(left=":")) | (Bracketed(left=":"), Leaf()):
            return _ratio_equals(reference, given)
        case (Leaf(), Bracketed()) | (Bracketed(), Leaf()):
            return _regions_equal(reference, given)
    return _values_equal(reference, given)


def _listings_equal(reference: Node, given: Node) -> bool:
    """Compares a list with another one, or with a tuple: in any order, unless the reference is the tuple."""
    match reference, given:
        case Listing(), Listing():
            return _in_any_order(reference.items, given.items)
        case Bracketed(), Listing():
            return _in_order(reference.items, given.items)
        case Listing(), Bracketed():
            is_interval = len(given.items) == _PAIR and (given.left, given.right) != ("(", ")")
            return not is_interval and _in_any_order(reference.items, given.items)
    return False


def _without_one_item(node: Node) -> Node:
    while isinstance(node, Listing) and len(node.items) == 1:
        [node] = node.items
    return node


def leaves_equal(reference: str, given: str) -> bool:
    """Compares two parts without structure: numbers, words, else expressions."""
    if _squeezed(reference) == _squeezed(given):
        return True
    in_base, given_in_base = numeral_in_base(reference), numeral_in_base(given)
    if not (in_base and given_in_base) and (_is_words(reference) or _is_words(given)):
        return _plain_words(reference) == _plain_words(given) != ""
    a, b = in_base or numeral(reference), given_in_base or numeral(given)
    if a is not None and b is None:
        b = numeral(without_letter(given))
    if a is not None and b is not None:
        return numerals_equal(a, b)
    if in_base or given_in_base:
        return False
    if reference.isalpha() and given.isalpha() and len(reference) > 1 and reference.casefold() == given.casefold():
        return True
    x, y = expression(reference), expression(given)
    if x is None or y is None:
        return False
    return same_value(x, y) or _is_rounded(a, y) or _is_rounded(b, x)


def _is_rounded(number: Numeral | None, value: Value) -> bool:
    return number is not None and number.last_place is not None and same_decimal(number, value)


def _squeezed(text: str) -> str:
    return re.sub(r"(?<!\w)\s+|\s+(?!\w)", "", text)


def _is_words(text: str) -> bool:
    return _WORDS.search(re.sub(r"\\(?!text)[A-Za-z]+(?:\{[a-z]*matrix\})?|_\{[^{}]*\}", "", text)) is not None


def _plain_words(text: str) -> str:
    return re.sub(r"[^\w+-]+", " ", re.sub(r"\\text", " ", text)).strip().casefold()


def _in_order(reference: Sequence[Node], given: Sequence[Node]) -> bool:
    return len(reference) == len(given) and all(equal(a, b) for a, b in zip(reference, given, strict=True))


def _in_any_order(reference: Sequence[Node], given: Sequence[Node]) -> bool:
    """Whether each item equals one of the other's that no earlier one took; repeated ones count once."""
    left, right = _distinct(reference), _distinct(given)
    if len(left) != len(right):
        return False
    for one in left:
        found = next((other for other in right if equal(one, other)), None)
        if found is None:
            return False
        right.remove(found)
    return True


def _distinct(items: Sequence[Node]) -> list[Node]:
    flat = [inner for item in items for inner in (item.items if isinstance(item, Listing) else (item,))]
    kept: list[Node] = []
    for item in flat:
        if not any(equal(item, other) for other in kept):
            kept.append(item)
    return kept


def _brackets_equal(reference: Bracketed, given: Bracketed) -> bool:
    if ":" in (reference.left, given.left):
        return reference.left == given.left and _ratios_equal(reference, given)
    is_interval = len(reference.items) == _PAIR and not {r"\langle"} & {reference.left, given.left}
    if is_interval and (reference.left, reference.right) != (given.left, given.right):
        return False
    return _in_order(reference.items, given.items)


@safely(otherwise=False)
def _ratios_equal(reference: Bracketed, given: Bracketed) -> bool:
    """Whether the parts of two ratios are proportional."""
    values = [[value_of(item) for item in one.items] for one in (reference, given)]
    if len(values[0]) != len(values[1]) or any(value is None or value == 0 for one in values for value in one):
        return _in_order(reference.items, given.items)
    return all(same_value(a * values[1][0], b * values[0][0]) for a, b in zip(*values, strict=True))


@safely(otherwise=False)
def _ratio_equals(reference: Node, given: Node) -> bool:
    """Whether a ratio of two parts is the other's value."""
    ratio, other = (reference, given) if isinstance(reference, Bracketed) else (given, reference)
    assert isinstance(ratio, Bracketed)
    values: list[Value] = [value_of(item) for item in (*ratio.items, other)]
    if len(ratio.items) != _PAIR or any(value is None for value in values):
        return False
    above, below, quotient = values
    return below != 0 and same_value(above / below, quotient)


@safely(otherwise=None)
def value_of(node: Node) -> Value:
    """The expression of a leaf or a matrix; None of anything else."""
    if isinstance(node, Leaf):
        return expression(node.text)
    if isinstance(node, Matrix):
        rows = [[value_of(entry) for entry in row] for row in node.rows]
        is_whole = all(entry is not None for row in rows for entry in row) and len({len(row) for row in rows}) == 1
        return sympy.ImmutableMatrix(rows) if is_whole else None
    return None


def _values_equal(reference: Node, given: Node) -> bool:
    a, b = value_of(reference), value_of(given)
    return a is not None and b is not None and same_value(a, b)


def _relations_equal(reference: Node, given: Node) -> bool:
    """Compares equations and inequalities; the right side alone counts where the left is a name of it."""
    named, given_named = _named(reference), _named(given)
    if named and given_named:
        if _names_equal(named[0], given_named[0]):
            return equal(named[1], given_named[1])
        return isinstance(reference, Relation) and isinstance(given, Relation) and _chains_equal(reference, given)
    if isinstance(reference, Relation) and isinstance(given, Relation):
        return _chains_equal(reference, given) or _regions_equal(reference, given)
    if named and not isinstance(given, Relation):
        return _in_order(*_by_name(named, given)) or equal(named[1], given)
    if given_named and not isinstance(reference, Relation):
        return _in_order(*reversed(_by_name(given_named, reference))) or equal(reference, given_named[1])
    if isinstance(given, Relation) and (value := _proved(given)) is not None and not isinstance(reference, Relation):
        return equal(reference, value)
    if (
        isinstance(reference, Relation)
        and (value := _proved(reference)) is not None
        and not isinstance(given, Relation)
    ):
        return equal(value, given)
    return _regions_equal(reference, given)


def _named(node: Node) -> tuple[Node, Node] | None:
    """Name and value of ``x = 5``, ``f(x) = x + 1``, ``(x, y) = (1, 2)`` or ``5 = x``; None of anything else."""
    if not isinstance(node, Relation) or set(node.signs) - {"=", r"\in", r"\equiv"}:
        return None
    first, last = node.sides[0], node.sides[-1]
    if _is_named(first):
        return first, last
    return (last, first) if len(node.sides) == _PAIR and _is_named(last) and node.signs == ("=",) else None


def _is_named(node: Node) -> bool:
    if isinstance(node, Bracketed):
        return all(_is_named(item) for item in node.items)
    return isinstance(node, Leaf) and is_name(node.text)


def _names_equal(one: Node, other: Node) -> bool:
    if isinstance(one, Leaf) and isinstance(other, Leaf):
        return _squeezed(one.text).casefold() == _squeezed(other.text).casefold()
    return one == other


def _by_name(named: tuple[Node, Node], other: Node) -> tuple[Sequence[Node], Sequence[Node]]:
    """``(x, y) = (1, 2)`` beside ``x = 1, y = 2``, both as lists of equations in the order of the first."""
    names, values = named
    if not (isinstance(names, Bracketed) and isinstance(values, Bracketed) and isinstance(other, Listing)):
        return (names,), ()
    equations = [Relation((name, value), ("=",)) for name, value in zip(names.items, values.items)]  # noqa: B905
    order = {_squeezed(name.text): index for index, name in enumerate(names.items) if isinstance(name, Leaf)}
    pairs = [(pair[0], item) for item in other.items if (pair := _named(item))]
    keyed = [(order.get(_squeezed(name.text), -1), item) for name, item in pairs if isinstance(name, Leaf)]
    return equations, [item for _, item in sorted(keyed, key=lambda one: one[0])]


def _proved(node: Relation) -> Node | None:
    """The value of ``2 + 3 = 5``: all sides are equal, and none has a symbol; None of anything else."""
    values = [value_of(side) for side in node.sides]
    if set(node.signs) != {"="} or any(value is None or value.free_symbols for value in values):
        return None
    return node.sides[-1] if all(same_value(values[0], value) for value in values[1:]) else None


def _chains_equal(reference: Relation, given: Relation) -> bool:
    """Whether two chains have equal sides, from either end, or are one relation each, the same but for a factor."""
    signs, sides = given.signs, given.sides
    flipped = tuple(_FLIPPED.get(sign, sign) for sign in reversed(signs))
    for found_signs, found_sides in ((signs, sides), (flipped, tuple(reversed(sides)))):
        if found_signs == reference.signs and _in_order(reference.sides, found_sides):
            return True
    if len(sides) != _PAIR or len(reference.sides) != _PAIR:
        return False
    values = [value_of(side) for side in (*reference.sides, *sides)]
    if any(value is None for value in values):
        return False
    left, right = (values[0], values[1]), (values[2], values[3])
    if reference.signs[0] != signs[0]:
        right, signs = (right[1], right[0]), flipped
    return reference.signs == signs and same_equation(left, right, is_directed=signs[0] not in ("=", r"\neq"))


def _regions_equal(reference: Node, given: Node) -> bool:
    one, other = regions.region(reference, value_of), regions.region(given, value_of)
    return one is not None and other is not None and regions.regions_equal(one, other)
