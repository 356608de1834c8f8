r"""Finds the final answer in a response: the last ``\boxed{...}`` or the last line ``Answer: ...``."""

import re
from collections import deque

_BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
_ANSWER = r"[^\w\n]*+(?:the[ ]+)?(?:final[ ]+)?answer[ \t*_]*+:"
_ANSWER_LINE = re.compile(
    rf"^{_ANSWER}[\s*_]*+(?!{_ANSWER})(?P<answer>[^\n]*)",
    re.IGNORECASE | re.MULTILINE,
)
"""Possessive quantifiers, so that a response of a million blanks takes linear time."""

_WRAPPING = " \t\r\n*_`$"


def final_answer(response: str) -> str | None:
    r"""The final answer of a response, or None.

    It is the last complete ``\boxed{...}``, or the text after ``Answer:`` on its line (or on the next line if there is
    none), whichever comes later; a box inside such a line is that line's answer. Dollar signs, emphasis marks and a
    full stop around it are removed.
    """
    box = _last_box(response)
    line = next(iter(deque(_ANSWER_LINE.finditer(response), maxlen=1)), None)  # the last one
    if line is not None and (box is None or box[0] < line.start("answer")):
        return _unwrapped(line["answer"]) or None
    return None if box is None else _unwrapped(response[slice(*box)])


def last_boxed(text: str) -> str | None:
    r"""The content of the last ``\boxed{...}`` with balanced braces, or None; the inner one of nested boxes.

    Escaped braces (``\{``, ``\}``) are ordinary characters. Linear time.
    """
    box = _last_box(text)
    return None if box is None else text[slice(*box)]


def _last_box(text: str) -> tuple[int, int] | None:
    """Start and end of the content of the last box."""
    open_braces: list[int | None] = []  # start of a box's content, None for an ordinary brace
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
