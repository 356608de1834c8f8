r"""Decides whether a given answer equals the reference, part by part of their structure."""

import re
from collections.abc import Callable, Sequence

import sympy

from gtpo_megatron.rewards.answers import regions
from gtpo_megatron.rewards.answers.expressions import (
    Value,
    expression,
    is_about,
    safely,
    same_decimal,
    same_equation,
    same_value,
)
from gtpo_megatron.rewards.answers.nodes import (
    Bracketed,
    Clock,
    Leaf,
    Listing,
    Matrix,
    Node,
    Quantified,
    Relation,
    SetOperation,
)
from gtpo_megatron.rewards.answers.numerals import Numeral, numeral, numeral_in_base, numerals_equal
from gtpo_megatron.rewards.answers.reading import NOON, is_name, renamed
from gtpo_megatron.rewards.answers.units import without_letter

_WORDS = re.compile(r"\\text\{|[A-Za-z]{4,}|[A-Za-z]{2,}[ -]+[A-Za-z]{2,}")
_FLIPPED = {"<": ">", ">": "<", r"\leq": r"\geq", r"\geq": r"\leq", "=": "=", r"\neq": r"\neq"}
_PAIR = 2
_INTEGERS = r"\mathbb{Z}"
_ABOUT = r"\approx"
_DEGREES = re.compile(r"(?P<number>.*\S)\s*\^\s*\\circ\s*")


def equal(reference: Node, given: Node) -> bool:
    """Whether the given answer is right. Not symmetric: a name may be left out, and added, but not changed."""
    if reference == given:
        return True
    reference, given = _without_one_item(reference), _without_one_item(given)
    for kind, compare in _BY_KIND:
        if isinstance(reference, kind) or isinstance(given, kind):
            return compare(reference, given)
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


def _members_equal(reference: Node, given: Node) -> bool:
    r"""Compares answers for each member of a set, whose symbol has any name: ``n\pi, n \in \mathbb{Z}``.

    The condition may be left out; a given answer may add only that the symbol is an integer.
    """
    match reference, given:
        case Quantified(), Quantified():
            same = renamed(given, reference.symbol)
            return reference.domain == given.domain and same is not None and equal(reference.answer, same)
        case Quantified(), _:
            return equal(reference.answer, given)
        case _, Quantified():
            return given.domain == _INTEGERS and equal(reference, given.answer)
    return False


def _times_equal(reference: Node, given: Node) -> bool:
    return _times(reference) & _times(given) != set()


def _times(node: Node) -> set[tuple[int, ...]]:
    """The times of day that an answer may mean: both halves, if it has no mark and an hour up to 12."""
    if isinstance(node, Clock):
        return {(node.hour, *node.rest)}
    parts = node.items if isinstance(node, Bracketed) and node.left == ":" else (node, Leaf("0"))
    texts = [part.text for part in parts if isinstance(part, Leaf)]
    if len(texts) != len(parts) or not all(text.isdecimal() for text in texts):
        return set()
    hour, *rest = map(int, texts)
    hours = {hour} if hour == 0 or hour > NOON else {hour % NOON, hour % NOON + NOON}
    return {(one, *rest) for one in hours}


def _listings_equal(reference: Node, given: Node) -> bool:
    return _items_equal(reference, given) or _regions_equal(reference, given)


def _items_equal(reference: Node, given: Node) -> bool:
    """Compares a list with another one, or with a tuple: in any order, unless the reference is the tuple."""
    match reference, given:
        case Listing(), Listing():
            return _in_any_order(reference.items, given.items)
        case Bracketed(), Listing():
            is_half_open = (reference.left, reference.right) in (("[", ")"), ("(", "]"))
            return not is_half_open and _in_order(reference.items, given.items)
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
    x, y = _values(reference, given)
    if x is None or y is None:
        return False
    return same_value(x, y) or _is_rounded(a, y) or _is_rounded(b, x)


def _values(reference: str, given: str) -> tuple[Value, Value]:
    r"""The expressions of two leaves; of ``60^\circ`` beside a multiple of pi its radians."""
    texts = [reference, given]
    for text, other in ((reference, given), (given, reference)):
        degrees = _DEGREES.fullmatch(text)
        if degrees and r"\pi" in other and not _DEGREES.fullmatch(other):
            texts[texts.index(text)] = rf"\frac{{({degrees['number']})\pi}}{{180}}"
    return expression(texts[0]), expression(texts[1])


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
    r"""Compares equations and inequalities, with or without a number that rounds a side: ``\sqrt2 \approx 1.4``."""
    readings = [(one, other) for one in _rounded_or_not(reference) for other in _rounded_or_not(given)]
    return any(equal(one, other) for one, other in readings[1:]) or _as_written(*map(_with_equals, (reference, given)))


def _rounded_or_not(node: Node) -> list[Node]:
    """The relation; if it ends in a number that is about another side, also the relation without that number."""
    if not isinstance(node, Relation) or node.signs[-1] != _ABOUT:
        return [node]
    *rest, before, last = node.sides
    if _rounds(last, before):
        kept, signs = (*rest, before), node.signs[:-1]
    elif not rest and _rounds(before, last):
        kept, signs = (last,), ()
    else:
        return [node]
    return [node, Relation(kept, signs) if signs else kept[0]]


def _with_equals(node: Node) -> Node:
    """The relation in which a name may be about its value."""
    if not isinstance(node, Relation):
        return node
    return Relation(node.sides, tuple("=" if sign == _ABOUT else sign for sign in node.signs))


def _rounds(node: Node, exact: Node) -> bool:
    """Whether a side is a number that rounds, or cuts, the value of another one to its last digit."""
    number = numeral(node.text) if isinstance(node, Leaf) else None
    value = value_of(exact)
    return number is not None and value is not None and is_about(number, value)


def _as_written(reference: Node, given: Node) -> bool:
    """Compares two of which one is a relation; the right side alone counts where the left is a name of it."""
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
    if not isinstance(node, Relation) or set(node.signs) - {"=", _ABOUT, r"\in", r"\equiv"}:
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


_BY_KIND: tuple[tuple[type[Node], Callable[[Node, Node], bool]], ...] = (
    (Quantified, _members_equal),
    (Clock, _times_equal),
    (Relation, _relations_equal),
    (SetOperation, _regions_equal),
    (Listing, _listings_equal),
)
"""What compares two parts of which one is of this kind; the first that fits."""
