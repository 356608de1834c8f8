r"""Reads the structure of a normalised answer: lists, brackets, equations and inequalities, unions of sets, matrices.

What has no structure is a :class:`~gtpo_megatron.rewards.answers.nodes.Leaf`: a number, an expression or words.
"""

import functools
import re
from collections.abc import Iterator

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
from gtpo_megatron.rewards.answers.units import without_units

MAX_ITEMS = 200
"""Items of a list that are read; a longer one is one leaf."""

MAX_DEPTH = 30
"""Brackets in brackets of an answer that is read; a parser needs many calls for each."""


_TOKEN = r"\\begin\{\w+\*?\}|\\end\{\w+\*?\}|\\[{}]|\\(?:langle|rangle)|\\[A-Za-z]+|\\.|[()\[\]{}]"
_OPENING = ("(", "[", "{", r"\{", r"\langle")
_CLOSING = (")", "]", "}", r"\}", r"\rangle")
_AND_OR = r"(?:(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])|&(?!\s*[=<>]))"
_SEPARATOR = rf"[,;]\s*{_AND_OR}|[,;]|{_AND_OR}"
_RELATION = r"\\(?:leq|geq|neq|in|equiv|approx)(?![A-Za-z])|[=<>]"
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
NOON = 12
"""Hours of half a day."""
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_TIME = re.compile(
    r"(?:\\text\{\s*)?(?P<hour>\d{1,2})(?P<rest>(?::\d\d){0,2})(?P<gap>\s*(?:\\text\{\s*)?)"
    r"(?P<half>[AaPp]\.?\s?[Mm])\.?\s*\}?"
)
_FOR = r"(?:where|for|with)\b(?:\s+(?:all|any|every|each|some))?"
_QUANTIFIER = rf"(?:(?:\\text\{{\s*,?\s*)?{_FOR}\s*\}}?|\\forall)"
_SETS = r"(?P<set>\\mathbb\{[A-Z]\}(?:\^\{?\\?[+*]\}?|_\S+)?|[ZNQRC])"
_MEMBERS = re.compile(
    rf"(?P<answer>.+?)\s*(?:(?:[,;]\s*)?{_QUANTIFIER}|[,;]|(?P<open>\())\s*(?:{_QUANTIFIER}\s*)?"
    rf"(?:(?P<symbol>[A-Za-z])\s*(?:\\in\s*{_SETS}|(?:\\text\{{)?\s*is an(?:y)? integer\s*\}}?)"
    r"|(?:\\text\{\s*)?integers?\s*\}?\s*(?P<behind>[A-Za-z]))\s*(?(open)\))",
    re.DOTALL,
)
"""``n\\pi, n \\in \\mathbb{Z}``, ``2k \\text{ for any integer } k``, ``2k (k \\in \\mathbb{Z})``."""
_UNEQUAL = re.compile(r"[<>]|\\(?:leq|geq|neq|in)(?![A-Za-z])")
_LETTERS = re.compile(r"\\[A-Za-z]+|[A-Za-z]")
_NAME = re.compile(
    r"(?:m\s*)?(?:\\(?:Delta|angle|triangle|overline|vec|hat|bar|mathbf|mathbb|mathcal|text|operatorname)\s*)*"
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
    return _for_members(text) or _listing_of(text)


def _listing_of(text: str) -> Node:
    text = _without_sentence(text)
    text = _NOTE.sub("", text)
    if len(split(text, _SEPARATOR)[0]) == 1:  # of several answers each has its condition
        text = _CONDITION.sub("", text)
    return _listing(_without_thousands(text))


def _for_members(text: str) -> Quantified | None:
    r"""Reads ``n\pi, n \in \mathbb{Z}``; None if the text has no such condition, or the answer has one of its own."""
    found = _MEMBERS.fullmatch(text)
    if found is None or _UNEQUAL.search(found["answer"]):
        return None
    symbol = found["symbol"] or found["behind"]
    if symbol not in _LETTERS.findall(found["answer"]):
        return None
    domain = (found["set"] or "Z").strip()
    domain = f"\\mathbb{{{domain}}}" if len(domain) == 1 else domain
    return Quantified(read(found["answer"]), found["answer"], symbol, domain)


def renamed(members: Quantified, symbol: str) -> Node | None:
    """The answer with its symbol in place of this one; None if it has that one already."""
    if symbol == members.symbol:
        return members.answer
    if symbol in _LETTERS.findall(members.text):
        return None
    return read(_LETTERS.sub(lambda found: symbol if found[0] == members.symbol else found[0], members.text))


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
        and first.signs in (("=",), (r"\approx",), (r"\in",))
        and not any(isinstance(n, Relation) for n in rest)
    ):
        # n = 1, 2, 3: the name belongs to all of them
        return Relation((first.sides[0], Listing((first.sides[1], *rest), is_set=True)), first.signs)
    return Listing(nodes, is_and=bool(signs) and all(sign.endswith(("and", "&")) for sign in signs))


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
    """Reads the content of a text or of one pair of brackets, a matrix, a ratio, two values of a sign, or a leaf."""
    if (words := _in_words(text)) is not None:
        return words
    text = without_units(text)
    if (matrix := _matrix(text)) is not None:
        return matrix
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


def _in_words(text: str) -> Node | None:
    r"""Reads a time, or a list in one text such as ``\text{A, B, and C}``; None of anything else."""
    words = _TEXT.fullmatch(text)
    if words and len(split(words[1], _SEPARATOR)[0]) > 1:
        return _listing(words[1].strip())
    return _time(text)


def _time(text: str) -> Clock | None:
    """Reads a time with its half of the day; ``5am`` is a product."""
    found = _TIME.fullmatch(text)
    if found is None or not (found["rest"] or "text" in found["gap"] or (found["gap"] and not found["half"].islower())):
        return None
    hour = int(found["hour"])
    if hour < 13:
        hour = hour % 12 + (12 if found["half"][0] in "Pp" else 0)
    return Clock(hour, tuple(map(int, found["rest"].split(":")[1:])) or (0,)) if hour < 24 else None


def _signed(text: str, plus: str) -> str:
    text = text.replace(plus, "+").replace(r"\mp" if plus == r"\pm" else r"\pm", "-")
    return re.sub(r"^\s*\+\s*", "", text).strip()


def _matrix(text: str) -> Matrix | None:
    found = _MATRIX.fullmatch(text)
    lines = split(found["rows"], r"\\\\(?:\[[^\]]*\])?")[0] if found else []
    rows = [row for row in (split(line, "&")[0] for line in lines) if any(row)]
    return Matrix(tuple(tuple(_listing(entry) for entry in row) for row in rows)) if rows else None


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
