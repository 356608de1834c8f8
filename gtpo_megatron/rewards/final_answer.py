r"""Finds the final answer in a response: the last ``\boxed{...}`` or the last line ``Answer: ...``."""

import re
from collections import deque

_BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
_ANSWER = r"[^\w\n]*+(?:the[ ]+)?(?:final[ ]+)?answer[ \t*_]*+:"
_ANSWER_LINE = re.compile(
    rf"^{_ANSWER}[\s*_]*+(?!{_ANSWER})(?P<answer>[^\n]*)",
    re.IGNORECASE | re.MULTILINE,
)
"""Possessive quantifiers: a response of a million blanks takes no longer than any other."""

_WRAPPING = " \t\r\n*_`$"


def final_answer(response: str) -> str | None:
    r"""The answer that a response ends with, or None.

    The last complete ``\boxed{...}``, or what follows ``Answer:`` on its own line (or, where nothing does, on the next
    line), whichever comes later: a box inside such a line is the answer of that line. Dollars, emphasis marks and a
    full stop around it are left out.
    """
    box = _last_box(response)
    line = next(iter(deque(_ANSWER_LINE.finditer(response), maxlen=1)), None)  # the last one
    if line is not None and (box is None or box[0] < line.start("answer")):
        return _unwrapped(line["answer"]) or None
    return None if box is None else _unwrapped(response[slice(*box)])


def last_boxed(text: str) -> str | None:
    r"""The content of the last ``\boxed{...}`` whose braces close, or None; the inner one where boxes are nested.

    Escaped braces (``\{``, ``\}``) are characters, not braces. One pass: megabytes of open boxes cost
    no more than prose.
    """
    box = _last_box(text)
    return None if box is None else text[slice(*box)]


def _last_box(text: str) -> tuple[int, int] | None:
    """Where the content of the last box begins and ends."""
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
    return last


def _unwrapped(answer: str) -> str:
    return answer.strip(_WRAPPING).rstrip(".").strip(_WRAPPING)
