r"""Takes braces away that group nothing: ``{\frac{1}{2}}``, ``{{x+1}}``, ``-{5}``; arguments keep theirs."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

_TOKEN = re.compile(r"\\[A-Za-z]+\*?|\\.|.", re.DOTALL)
_TWO = frozenset(rf"\{kind}{name}" for kind in ("", "d", "t", "c") for name in ("frac", "binom"))
"""Commands of two arguments."""
_NONE = frozenset(
    rf"\{name}"
    for name in (
        *("pm", "mp", "cdot", "times", "div", "to", "left", "right", "quad", "qquad", "displaystyle", "infty", "circ"),
        *("approx", "sim", "simeq", "doteq", "equiv", "neq", "ne", "le", "leq", "ge", "geq", "lt", "gt", "in", "cup"),
        *("cap", "setminus", "pi", "alpha", "beta", "gamma", "theta", "lambda", "mu", "sigma", "omega", "phi"),
    )
)
"""Commands without arguments: a brace behind them is a group. Behind any other command it is an argument."""
_SIGNS = r"[,;=<>&:]|\\(?:approx|sim|simeq|doteq|equiv|neq?|leq?|geq?|lt|gt|in|pm|mp)(?![A-Za-z])|\\\\|\\[,;:!> ]|\$"
_BEGINS = re.compile(rf"(?:^|[(\[{{]|\\begin\{{[a-z]+\}}|\\[({{\[]|{_SIGNS})\s*$")
"""Before a group that is a whole part of an answer."""
_ENDS = re.compile(rf"\s*(?:$|[)\]}}.]|\\[)}}\]]|{_SIGNS}|~|\\(?:text|math|mbox|operatorname|q?quad|end))")
_ARGUMENT = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"
_ONE = re.compile(
    rf"\\[dtc]?frac\s*{_ARGUMENT}\s*{_ARGUMENT}|\\sqrt\s*(?:\[\d+\])?\s*{_ARGUMENT}|\\[dtc]?frac\d\d|\\sqrt\s*\d"
    r"|\\[A-Za-z]+|\d+\.\d+|[^\w\\{},]"
)
"""A group of one thing, which stays one without its braces."""
_OLD = re.compile(r"\\(?:over|choose|rm|bf|it|sf|tt)(?![A-Za-z])")
"""Commands that reach from brace to brace."""
_WORD = re.compile(r"\w+")


@dataclass(slots=True)
class _Open:
    """A brace that is not yet closed.

    Attributes:
        at: number of pieces before it.
        is_argument: whether it is an argument of a command.
        arguments: number of arguments that may still follow.
    """

    at: int
    is_argument: bool
    arguments: int


def without_groups(text: str) -> str:
    """The text without the braces of groups that are one thing, or a whole part of the answer. Linear time."""
    if "{" not in text:
        return text
    pieces: list[str] = []
    stack: list[_Open] = []
    arguments, rest = 0, len(text)
    for token in _tokens(text):
        rest -= len(token)
        if token == "{":
            stack.append(_Open(len(pieces), arguments > 0, arguments - 1))
            pieces.append(token)
            arguments = 0
        elif token == "}" and stack:
            opened = stack.pop()
            at = len(text) - rest
            _close(pieces, opened, text[at : at + 20], _whole_before(pieces, opened.at))
            arguments = max(opened.arguments, 0) if opened.is_argument else 0
        else:
            pieces.append(token)
            arguments = _arguments_after(token, arguments)
    return "".join(pieces)


def _tokens(text: str) -> Iterator[str]:
    return (found[0] for found in _TOKEN.finditer(text))


def _arguments_after(token: str, before: int) -> int:
    """How many arguments a brace behind this token may begin."""
    if token in ("^", "_"):
        return 1
    if token.isspace():
        return before
    if token == "]":  # of \sqrt[3]
        return 1
    if token.startswith("\\") and token[1:2].isalpha():
        return 2 if token in _TWO else 0 if token in _NONE else 1
    return 0


def _whole_before(pieces: list[str], at: int) -> str:
    return "".join(pieces[max(0, at - 16) : at])


def _close(pieces: list[str], opened: _Open, behind: str, before: str) -> None:
    """Ends a group: its content stands for it where that changes nothing."""
    content = "".join(pieces[opened.at + 1 :]).strip()
    if opened.is_argument or _OLD.search(content) or not _means_the_same(content, before, behind):
        pieces[opened.at :] = ["{" + "".join(pieces[opened.at + 1 :]) + "}"]
    else:
        pieces[opened.at :] = [content]


def _means_the_same(content: str, before: str, behind: str) -> bool:
    if _BEGINS.search(before) and _ENDS.match(behind):
        return True
    if _WORD.fullmatch(content):
        return not re.search(r"[\w\\}\])]$", before) and not (content[-1].isdigit() and behind[:1].isalnum())
    is_base = behind.lstrip()[:1] in ("^", "_", "!", "'")
    return _ONE.fullmatch(content) is not None and not is_base
