r"""Finds the final answer in a response: the last ``\boxed{...}`` or the last line ``Answer: ...``."""

import re
from collections import deque
from dataclasses import dataclass

_BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
_ANSWER = r"(?:[ \t]*\d{1,2}[.)])?[^\w\n]*+(?:the[ ]+)?(?:final[ ]+)?answer[ \t*_]*+[:\uff1a]"
_ANSWER_LINE = re.compile(
    rf"^{_ANSWER}[\s*_]*+(?!{_ANSWER})(?P<answer>[^\n]*)",
    re.IGNORECASE | re.MULTILINE,
)
"""Possessive quantifiers, so that a response of a million blanks takes linear time."""

_DISPLAYED = (("\\[", "\\]"), ("$$", "$$"))
"""Marks of a formula of several lines."""
_END = r"(?![A-Za-z])"
_FONT = r"\\(?:text|math|operatorname|mbox|hbox)[a-z]*\s*"
_GAP = rf"(?:[\s$*~]|\\[()\[\],;:!> ]|\\(?:q?quad|thinspace|enspace){_END}|\\(?:begin|end|hspace)\s*\*?\{{[\w.]+\*?\}})"
_WORD = r"(?:[,;]\s*)?(?:and|or|as well as)\s*[,;]?"
_JOINER = rf"(?:[,;]|\\?&|\\(?:land|lor|wedge|vee){_END}|\b(?:and|or|as well as)\b|{_FONT}\{{\s*(?:{_WORD}|[,;])\s*\}})"
_UNIT = (
    rf"(?:\\%|\^\s*(?:\\circ{_END}|\{{\s*\\circ\s*\}})"
    rf"|{_FONT}\{{(?!\s*{_WORD}\s*\}})[^{{}}]{{1,20}}\}}(?:\^\{{?\d\}}?)?)"
)
_NAMED = (
    rf"(?:[A-Za-z]|\\(?!q?quad)[A-Za-z]+)(?:_(?:\w|\{{[^{{}}]*\}}))?'*(?:\([^()]*\))?\s*&?\s*(?:=|\\in{_END})\s*&?"
    r"[\s$]*(?:\\[,;:! ]\s*)*"
)
"""``x =`` before a box."""
_LINE = r"\\\\(?:\[\w+\])?"
_JOINT = re.compile(
    rf"{_GAP}*+{_UNIT}?+{_GAP}*+"
    rf"(?:(?:{_LINE}{_GAP}*+)?(?:{_JOINER}(?:{_GAP}|{_LINE})*+)++(?:{_NAMED})?|{_LINE}{_GAP}*+{_NAMED})(?<!&)"
)
"""Between two boxes that are one answer: a mark or a word, or a new line with a name."""
_LONGEST_JOINT = 100
"""Characters of it, so that a response of many boxes takes linear time."""
_NAME_BEFORE = re.compile(
    rf"(?:^|[$,;&}}\n]|\\[(\[\\]|(?<![A-Za-z\\])[A-Za-z]{{2,}}\s|\\q?quad{_END})\s*(?P<name>{_NAMED})$"
)
_LONGEST_NAME = 40
_BOX_FIRST = re.compile(rf"{_GAP}*+(?:{_NAMED})?\\boxed")

_HOPE = re.compile(r"\bI hope (?:it|this|that) is correct\W*$")
"""Minerva's worked examples end so (arXiv 2206.14858)."""
_WRAPPING = " \t\r\n*_`$"


@dataclass(frozen=True, slots=True)
class _Box:
    """Positions of a box: its begin, and start and end of its content; a box that is never closed has no end."""

    begin: int
    start: int
    end: int | None


def final_answer(response: str) -> str | None:
    r"""The final answer of a response, or None.

    It is the last ``\boxed{...}``, or the text after ``Answer:`` on its line (or on the next line if there is none),
    whichever comes later; a box inside such a line is that line's answer. Dollar signs, emphasis marks and a full stop
    around it are removed. Boxes with only "and", "or" or a comma between them, in text or in mathematics, or
    on lines with names, are one answer; an empty box is passed over if there is another one; if the last box is never
    closed there is no answer, because the response was cut.
    """
    filled = _filled_boxes(response)
    line = next(iter(deque(_ANSWER_LINE.finditer(response), maxlen=1)), None)  # the last one
    if line is not None and (not filled or filled[-1].start < line.start("answer")):
        return _unwrapped(_whole_formula(response, line)) or None
    if not filled or filled[-1].end is None:
        return None
    return _contents(response, _joined(response, filled))


def boxed_answer(reference: str) -> str | None:
    r"""The boxes of a reference that are its answer, or None if it has none or the last one is never closed.

    Boxes are joined as a response's are. A reference that begins with a box is no solution that ends with one: all of
    its boxes count, whatever stands between them.
    """
    filled = _filled_boxes(reference)
    if not filled or filled[-1].end is None:
        return None
    return _contents(reference, filled if _BOX_FIRST.match(reference) else _joined(reference, filled))


def last_boxed(text: str) -> str | None:
    r"""The content of the last ``\boxed{...}``, or None if there is none or it is never closed.

    Escaped braces (``\{``, ``\}``) are ordinary characters. Of nested boxes the inner one counts, and an empty one is
    passed over if there is another one. Linear time.
    """
    boxes = _filled_boxes(text)
    return text[boxes[-1].start : boxes[-1].end] if boxes and boxes[-1].end is not None else None


def _filled_boxes(text: str) -> list[_Box]:
    """The boxes that are not empty, or all if all are."""
    boxes = _boxes(text)
    return [box for box in boxes if box.end is None or text[box.start : box.end].strip()] or boxes


def _boxes(text: str) -> list[_Box]:
    """The boxes in their order, the inner ones of nested boxes; one that is never closed, if it is the last."""
    open_braces: list[tuple[int, int] | None] = []  # beginning and content of a box, None for an ordinary brace
    found: list[_Box] = []
    last = -1
    for token in _BRACES.finditer(text):
        if token[0].startswith("\\boxed"):
            open_braces.append(token.span())
        elif token[0] == "{":
            open_braces.append(None)
        elif token[0] == "}" and open_braces:
            box = open_braces.pop()
            if box is not None and box[0] > last:  # a box around this one has begun before it
                last = box[0]
                found.append(_Box(*box, token.start()))
    cut = max((box for box in open_braces if box is not None), default=(-1, -1))
    return [*found, _Box(*cut, None)] if cut[0] > last else found


def _joined(response: str, boxes: list[_Box]) -> list[_Box]:
    """The last box, and those before it that are one answer with it."""
    first = len(boxes) - 1
    while first:
        end, begin = boxes[first - 1].end, boxes[first].begin
        if end is None or begin - end > _LONGEST_JOINT or not _JOINT.fullmatch(response, end + 1, begin):
            break
        first -= 1
    return boxes[first:]


def _contents(text: str, boxes: list[_Box]) -> str:
    """What is in the boxes; in several also the names before them, so that ``y = 1, x = 2`` is not ``x = 1, y = 2``."""
    if len(boxes) == 1:
        return _unwrapped(text[boxes[0].start : boxes[0].end])
    return ", ".join(dict.fromkeys(_name_of(text, box) + _unwrapped(text[box.start : box.end]) for box in boxes))


def _name_of(text: str, box: _Box) -> str:
    found = _NAME_BEFORE.search(text[max(0, box.begin - _LONGEST_NAME) : box.begin])
    if found is None or "=" in text[box.start : box.end]:
        return ""
    return re.sub(r"[&$\s]|\\[,;:! ]", "", found["name"])


def _whole_formula(response: str, line: re.Match[str]) -> str:
    """The answer of a line; all lines of a formula that begins on it."""
    for mark, end in _DISPLAYED:
        if line["answer"].strip() == mark and (at := response.find(end, line.end())) >= 0:
            return response[line.end() : at]
    return line["answer"]


def _unwrapped(answer: str) -> str:
    return _HOPE.sub("", answer.strip(_WRAPPING)).rstrip(".").strip(_WRAPPING)
