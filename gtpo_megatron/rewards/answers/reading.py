r"""Reads the structure of a normalised answer: lists, brackets, equations and inequalities, unions of sets, matrices.

What has no structure is a :class:`Leaf`: a number, an expression or words.
"""

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from gtpo_megatron.rewards.answers.units import without_units

MAX_ITEMS = 200
"""Items of a list that are read; a longer one is one leaf."""

MAX_DEPTH = 30
"""Brackets in brackets of an answer that is read; a parser needs many calls for each."""


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
        items: at least one.
        is_and: joined by "and": of inequalities all hold, else one of them.
        is_set: written in braces.
    """

    items: tuple[Node, ...]
    is_and: bool = False
    is_set: bool = False


@dataclass(frozen=True, slots=True)
class Bracketed(Node):
    """A tuple, a vector, an interval or a ratio: items in this order.

    Attributes:
        items: at least two.
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
        sides: at least two.
        signs: one less: ``=``, ``<``, ``>``, ``\leq``, ``\geq``, ``\neq``, ``\in``.
    """

    sides: tuple[Node, ...]
    signs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SetOperation(Node):
    r"""Sets joined by ``\cup``, ``\cap`` or ``\setminus``, from the left.

    Attributes:
        parts: at least two.
        signs: one less.
    """

    parts: tuple[Node, ...]
    signs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Matrix(Node):
    """Rows of entries."""

    rows: tuple[tuple[Node, ...], ...]


_TOKEN = r"\\begin\{\w+\*?\}|\\end\{\w+\*?\}|\\[{}]|\\(?:langle|rangle)|\\[A-Za-z]+|\\.|[()\[\]{}]"
_OPENING = ("(", "[", "{", r"\{", r"\langle")
_CLOSING = (")", "]", "}", r"\}", r"\rangle")
_AND_OR = r"(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])"
_SEPARATOR = rf"[,;]\s*{_AND_OR}|[,;]|{_AND_OR}"
_RELATION = r"\\(?:leq|geq|neq|in|equiv)(?![A-Za-z])|[=<>]"
_SET_SIGN = r"\\(?:cup|cap|setminus|backslash)(?![A-Za-z])"
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_MATRIX = re.compile(r"\\begin\{[pbBV]?matrix\}(?P<rows>.*)\\end\{[pbBV]?matrix\}", re.DOTALL)
_RATIO = re.compile(r"[^:]+(?::[^:]+)+")
_SENTENCE = re.compile(
    r"(?:\\text\{)?\s*(?P<before>[A-Za-z][A-Za-z'-]+(?:[ ,][^=<>]*?)?)\s(?:is|are|equals|be)"
    r"\s*:?\s*\}?\s*:?\s*(?P<rest>\S.*)",
    re.DOTALL,
)
_NOTE = re.compile(r"(?<=[\d})\]!])\s+\(\s*(?!mod\b|base\b|in base\b)[A-Za-z]{2,}[A-Za-z .,'-]*\)$")
_CONDITION = re.compile(
    r"(?:(?<=[\d})\]!])|(?<=[-+*/= ^][A-Za-z]))\s+(?:\\text\{\s*)?\(\s*"
    r"(?:(?:for|where|when|if|with|assuming|as|since)\b[^()]*|[^()]*(?:[<>=]|\\(?:leq|geq|neq|in)(?![A-Za-z]))[^()]*)\)$"
)
"""A note of signs: ``(x > 0)``, ``(for n \\geq 1)``."""
_NAME = re.compile(
    r"(?:m\s*)?(?:\\(?:angle|triangle|overline|vec|hat|bar|mathbf|mathbb|mathcal|text|operatorname)\s*)*"
    r"(?:[A-Za-z]|[A-Z]{2,}|[A-Za-z]{4,}|sum|max|min|\\[A-Za-z]+|\{[A-Za-z][A-Za-z .'-]*\}"
    r"|[A-Za-z]{2,}(?: [A-Za-z]{2,})+)"
    r"(?:_(?:\w|\{[^{}]*\})|\^\{-1\}|'+)*(?:\s*\((?:[^()]|\([^()]*\))*\))?"
)
_FUNCTION_OF_ONE = re.compile(
    r"\\(?:sin|cos|tan|cot|sec|csc|log|ln|det|dim|arg)\s*(?:[A-Za-z]|\\[a-z]+|\\angle\s*[A-Z]+|\{[^{}]*\}|\([^()]*\))"
)
_SIZE = re.compile(r"\|+\s*(?:[A-Z]+|z|\\(?:vec|overline|overrightarrow|mathbf)\s*\{\s*\w+\s*\})\s*\|+")
"""A length or a number of elements; ``|x| = 5`` is an equation."""
_DERIVATIVE = re.compile(r"\\frac\{d\^?\{?\d?\}?\s*[A-Za-z]?\}\{d\s*[A-Za-z](?:\^\{?\d\}?)?\}")
_NO_NAMES = re.compile(r"\\(?:frac|sqrt|pi|infty|emptyset|pm|times|cdot|sum|int|lim|begin)(?![A-Za-z])")


def is_name(text: str) -> bool:
    r"""Whether a left side is one symbol or function, whose value is on the right: ``x``, ``f(x)``, ``\angle A``."""
    if _DERIVATIVE.fullmatch(text) or _FUNCTION_OF_ONE.fullmatch(text) or _SIZE.fullmatch(text):
        return True
    return _NAME.fullmatch(text) is not None and _NO_NAMES.search(text) is None


def split(text: str, separator: str) -> tuple[list[str], list[str]]:
    """The pieces between separators outside of all brackets, and the separators; one piece if there are none."""
    pieces, signs, start = [], [], 0
    for at, end in _outside(text, separator):
        pieces.append(text[start:at].strip())
        signs.append(text[at:end].strip())
        start = end
    return [*pieces, text[start:].strip()], signs


@functools.lru_cache(maxsize=64)
def _scanner(separator: str) -> re.Pattern[str]:
    return re.compile(f"(?P<separator>{separator})|{_TOKEN}" if separator else _TOKEN)


def _outside(text: str, separator: str) -> Iterator[tuple[int, int]]:
    depth = 0
    for found in _scanner(separator).finditer(text):
        token = found[0]
        if token in _OPENING or token.startswith(r"\begin"):
            depth += 1
        elif token in _CLOSING or token.startswith(r"\end"):
            depth -= 1
        elif depth == 0 and found.lastgroup == "separator":
            yield found.span()


def is_readable(text: str) -> bool:
    """Whether the braces of groups are balanced, and brackets are not nested more than ``MAX_DEPTH`` deep."""
    braces = brackets = deepest = 0
    for found in re.finditer(r"\\.|[{}()\[\]]", text, re.DOTALL):
        braces += {"{": 1, "}": -1}.get(found[0], 0)
        brackets += 1 if found[0] in "([{" else -1 if found[0] in ")]}" else 0
        deepest = max(deepest, brackets)
        if braces < 0:
            return False
    return braces == 0 and deepest <= MAX_DEPTH


@functools.lru_cache(maxsize=4096)
def read(text: str) -> Node:
    """The structure of a normalised answer."""
    text = _without_sentence(text)
    text = _NOTE.sub("", text)
    if len(split(text, _SEPARATOR)[0]) == 1:  # of several answers each has its condition
        text = _CONDITION.sub("", text)
    return _listing(_without_thousands(text))


def _without_sentence(text: str) -> str:
    """Returns the text after "is" in a sentence such as "The number is 5"; any other text as it is."""
    found = _SENTENCE.fullmatch(text)
    if found is None or not re.search(r"\d|\\(?!text)|^[a-zA-Z]$", found["rest"]):
        return text
    return _without_sentence(found["rest"])


def _without_thousands(text: str) -> str:
    """The text without commas in numbers such as 12,345; in brackets a comma separates."""
    spans = list(_outside(text.replace("{", " ").replace("}", " "), _THOUSANDS.pattern))
    for start, end in reversed(spans):
        text = text[:start] + text[start:end].replace(",", "") + text[end:]
    return text


def _listing(text: str) -> Node:
    pieces, signs = split(text, _SEPARATOR)
    pieces = [piece for piece in pieces if piece]
    if len(pieces) > MAX_ITEMS or not pieces:
        return Leaf(text)
    nodes = tuple(_relation(piece) for piece in pieces)
    if len(nodes) == 1:
        return nodes[0]
    first, rest = nodes[0], nodes[1:]
    if (
        isinstance(first, Relation)
        and first.signs in (("=",), (r"\in",))
        and not any(isinstance(n, Relation) for n in rest)
    ):
        # n = 1, 2, 3: the name belongs to all of them
        return Relation((first.sides[0], Listing((first.sides[1], *rest), is_set=True)), first.signs)
    return Listing(nodes, is_and=bool(signs) and all(sign.endswith("and") for sign in signs))


def _relation(text: str) -> Node:
    pieces, signs = split(text, _RELATION)
    if signs and not pieces[0]:  # = 5
        pieces, signs = pieces[1:], signs[1:]
    if not signs:
        return _union(pieces[0])
    if not all(pieces):
        return _union(text)
    return Relation(tuple(_union(piece) for piece in pieces), tuple(signs))


def _union(text: str) -> Node:
    pieces, signs = split(text, _SET_SIGN)
    if not signs or not all(pieces):
        return _whole(text)
    return SetOperation(
        tuple(_whole(piece) for piece in pieces), tuple(sign.replace("backslash", "setminus") for sign in signs)
    )


def _whole(text: str) -> Node:
    """Reads the content of one pair of brackets, a matrix, a ratio, two values of a sign, or a leaf."""
    text = without_units(text)
    if found := _MATRIX.fullmatch(text):
        rows = [row for row in _matrix_rows(found["rows"]) if any(row)]
        if rows:
            return Matrix(tuple(tuple(_listing(entry) for entry in row) for row in rows))
    if (inner := _inside(text)) is not None:
        left, content, right = inner
        pieces = [piece for piece in split(content, "[,;]")[0] if piece]
        if left == r"\{":
            if set_builder := re.match(r"[A-Za-z]\s*[|:]\s*", content):
                return _listing(content[set_builder.end() :])
            return Listing(tuple(_relation(piece) for piece in pieces), is_set=True) if pieces else Leaf(r"\emptyset")
        if len(pieces) > 1:
            return Bracketed(tuple(_relation(piece) for piece in pieces), left, right)
        if left in ("(", "[") and right in (")", "]"):
            return _listing(content)
    if r"\pm" in text or r"\mp" in text:
        return Listing((_whole(_signed(text, r"\pm")), _whole(_signed(text, r"\mp"))))
    if _RATIO.fullmatch(text) and not re.search(r"\\text|[{}()]", text):
        return Bracketed(tuple(Leaf(part.strip()) for part in text.split(":")), ":", ":")
    return Leaf(text)


def _signed(text: str, plus: str) -> str:
    text = text.replace(plus, "+").replace(r"\mp" if plus == r"\pm" else r"\pm", "-")
    return re.sub(r"^\s*\+\s*", "", text).strip()


def _matrix_rows(text: str) -> list[list[str]]:
    return [list(split(row, "&")[0]) for row in split(text, r"\\\\(?:\[[^\]]*\])?")[0]]


def _inside(text: str) -> tuple[str, str, str] | None:
    """The brackets around the whole text and what they hold; None if there are none."""
    tokens = list(re.finditer(_TOKEN, text))
    if not tokens or tokens[0].start() or tokens[-1].end() != len(text):
        return None
    left, right = tokens[0][0], tokens[-1][0]
    if left not in (*_OPENING[:2], r"\{", r"\langle", "]") or right not in (*_CLOSING[:2], r"\}", r"\rangle", "["):
        return None
    depth = 0
    for found in tokens:
        if found[0] in _OPENING or found[0].startswith(r"\begin"):
            depth += 1
        elif found[0] in _CLOSING or found[0].startswith(r"\end"):
            depth -= 1
        if depth == 0 and found is not tokens[-1]:
            return None
    return left, text[tokens[0].end() : tokens[-1].start()].strip(), right
