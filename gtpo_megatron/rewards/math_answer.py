r"""Grades the last ``\boxed{...}`` of a response against a reference answer with math-verify.

math-verify (sympy: a second) is imported with the module, so that a worker pays before its first row's clock runs.
"""

import functools
import logging
import re
from typing import Any

import math_verify

from gtpo_megatron.errors import DataError

# It warns once that we switched its SIGALRM limit off, which is on purpose.
logging.getLogger("math_verify").setLevel(logging.ERROR)

MAX_ANSWER_CHARACTERS = 2_000
"""A longer box is wrong without asking the parser, which is slower than linear; real answers have tens of them."""

_BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
_PLAIN_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]{0,8})")


def math_answer(response: str, answer: str) -> float:
    r"""1 if the last complete box of the response equals the answer, else 0.

    No box, or a box that does not parse, is a wrong answer. There is no time limit in here: math-verify's own one needs
    the main thread's SIGALRM, so the pool that calls this holds the clock.

    Args:
        response: the sampled text.
        answer: the reference, as text or LaTeX, with or without ``\boxed`` or dollars.

    Returns:
        1.0 or 0.0.

    Raises:
        DataError: the reference answer is empty or cannot be parsed: no response can be graded against it.
    """
    reference = _unwrapped(answer.strip())
    if not reference:
        raise DataError(f"the reference answer is empty, got {answer!r}; every row needs an answer to grade against")
    boxed = last_boxed(response)
    if boxed is None or len(boxed) > MAX_ANSWER_CHARACTERS:
        return 0.0
    boxed = boxed.strip()
    # Two short cuts past a parser that takes milliseconds; tests show that math-verify always says the same.
    if boxed == reference:
        return 1.0
    if _PLAIN_INTEGER.fullmatch(boxed) and _PLAIN_INTEGER.fullmatch(reference):
        return float(int(boxed) == int(reference))
    gold = _parse(reference)
    if not gold:
        raise DataError(f"math-verify cannot parse the reference answer {answer!r}; fix the row or drop it")
    return float(math_verify.verify(list(gold), list(_parse(boxed)), timeout_seconds=None))


def last_boxed(text: str) -> str | None:
    r"""The content of the last ``\boxed{...}`` whose braces close, or None; the inner one where boxes are nested.

    Escaped braces (``\{``, ``\}``) are characters, not braces. One pass: megabytes of open boxes cost
    no more than prose.
    """
    open_braces: list[int | None] = []  # where the content of a box starts, None for an ordinary brace
    last: tuple[int, int] | None = None
    for token in _BRACES.finditer(text):
        if token[0].startswith("\\boxed"):
            open_braces.append(token.end())
        elif token[0] == "{":
            open_braces.append(None)
        elif token[0] == "}" and open_braces:
            start = open_braces.pop()
            if start is not None and (last is None or start > last[0]):
                last = (start, token.start())
    return None if last is None else text[slice(*last)]


def _unwrapped(reference: str) -> str:
    """The reference without a box or dollars around it."""
    boxed = last_boxed(reference)
    return (reference.strip("$") if boxed is None else boxed).strip()


@functools.lru_cache(maxsize=4096)
def _parse(content: str) -> tuple[Any, ...]:
    """Parses what stands in a box; cached, because a group's responses mostly agree and share one reference."""
    return tuple(math_verify.parse(f"\\boxed{{{content}}}", parsing_timeout=None))
