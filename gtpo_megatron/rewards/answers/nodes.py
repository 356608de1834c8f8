"""The structure of an answer: its parts, and what they are."""

from dataclasses import dataclass


class Node:
    """A part of an answer."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Leaf(Node):
    """A number, an expression or words.

    Attributes:
        text: normalised, without a unit.
    """

    text: str


@dataclass(frozen=True, slots=True)
class Listing(Node):
    r"""Several answers in any order: ``1, 2``, ``1 or 2``, ``\{1, 2\}``, ``3 \pm 1``.

    Attributes:
        items: members, at least one.
        is_and: whether they are joined by "and": of inequalities all hold, else one of them.
        is_set: whether it is written in braces.
    """

    items: tuple[Node, ...]
    is_and: bool = False
    is_set: bool = False


@dataclass(frozen=True, slots=True)
class Bracketed(Node):
    """A tuple, a vector, an interval or a ratio: items in this order.

    Attributes:
        items: members, at least two.
        left: bracket; ``:`` of a ratio.
        right: bracket.
    """

    items: tuple[Node, ...]
    left: str
    right: str


@dataclass(frozen=True, slots=True)
class Relation(Node):
    r"""A chain ``a = b < c`` or ``x \in S``.

    Attributes:
        sides: sides, at least two.
        signs: one less: ``=``, ``<``, ``>``, ``\leq``, ``\geq``, ``\neq``, ``\in``.
    """

    sides: tuple[Node, ...]
    signs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SetOperation(Node):
    r"""Sets joined by ``\cup``, ``\cap`` or ``\setminus``, from the left.

    Attributes:
        parts: parts, at least two.
        signs: one less.
    """

    parts: tuple[Node, ...]
    signs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Matrix(Node):
    """Rows of entries."""

    rows: tuple[tuple[Node, ...], ...]


@dataclass(frozen=True, slots=True)
class Clock(Node):
    """A time of day with its half: ``2:30 PM``.

    Attributes:
        hour: 0 to 23.
        rest: minutes, and seconds if they are written.
    """

    hour: int
    rest: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Quantified(Node):
    r"""An answer for each member of a set: ``n\pi, n \in \mathbb{Z}``.

    Attributes:
        answer: the answer without the condition.
        text: text of the answer, in which the symbol can be renamed.
        symbol: ``n``.
        domain: ``\mathbb{Z}``.
    """

    answer: Node
    text: str
    symbol: str
    domain: str
