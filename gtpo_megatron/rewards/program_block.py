"""Finds the program in a response: which fenced block it is, where that begins and where it ends.

Of the blocks behind the last ``</think>``, or of all if none is there, the program is the last one that is marked with
the language; else the last one without a mark; else the last one. A response without any block is the program itself.

A block begins with three or more ````` or ``~``: alone in a line, in a list or a quotation, behind words, with or
without the language behind them. It ends with as many or more of the same sign, alone in a line, before a tag or a full
stop, or behind its last line, but not within a string of several lines (a docstring may have blocks); or where another
marked block, or ``</think>``, shows that it was never closed; or with the response. Indentation of the whole block is
taken off. A block of Markdown is searched for blocks itself. Empty blocks are passed over if there is another.
"""

import re
import textwrap
from dataclasses import dataclass

_BEGIN = re.compile(
    r"(?P<before>.*?)(?P<fence>`{3,}|~{3,})[ \t]*(?P<mark>\{?\.?[\w+#-]*)(?P<rest>.*)", re.DOTALL | re.ASCII
)
_CODE_BEGINS = re.compile(r"[ \t]+(?:def|class|import|from|print|for|while|if|return|#include|int|using)\b|[ \t]+@\w")
_ATTRIBUTES = re.compile(r"[\s:,{}.()=\w\"'/-]*")
_MARGIN = re.compile(r"[ \t]*(?:>[ \t]?|(?:[-*+]|\d+[.)])[ \t]+)*")
_QUOTES = re.compile(r"#|\"\"\"|'''|\"(?:\\.|[^\"\\])*\"?|'(?:\\.|[^'\\])*'?")
_THOUGHT = "</think>"

_MARKS = {"python": re.compile(r"i?py(thon)?[\d.]*"), "cpp": re.compile(r"c|cc|cxx|(cpp|c\+\+)\d*")}
_MARKDOWN = ("md", "markdown")


@dataclass(frozen=True, slots=True)
class _Block:
    mark: str
    text: str


def program_in(response: str, language: str = "python") -> str:
    """The program of a response, without empty lines around it; "" if there is none.

    Args:
        response: the sampled text.
        language: ``python`` or ``cpp``.
    """
    thought, end, answer = response.rpartition(_THOUGHT)
    blocks = _blocks(answer, language) or (_blocks(thought, language) if end else [])
    if not blocks:
        return _trimmed(answer)
    blocks = [block for block in blocks if block.text.strip()] or blocks  # a response may be cut where one begins
    of_language = [block for block in blocks if _MARKS[language].fullmatch(block.mark)]
    unmarked = [block for block in blocks if not block.mark]
    return _trimmed((of_language or unmarked or blocks)[-1].text)


def _trimmed(text: str) -> str:
    return text.strip("\n").rstrip()


def _blocks(text: str, language: str) -> list[_Block]:
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    found: list[_Block] = []
    at = 0
    while at < len(lines):
        begin = _begin(lines[at])
        at += 1
        if begin is None:
            continue
        before, fence, mark, first = begin
        if first is not None and first.endswith(fence):  # all of it in one line
            body = [first.removesuffix(fence)]
        else:
            is_python = language == "python" and (not mark or bool(_MARKS["python"].fullmatch(mark)))
            num, last, resumes = _until_end(lines[at:], fence, is_python=is_python)
            body = [*([first] if first else []), *lines[at : at + num], *([last] if last else [])]
            at += num + resumes
        inner = "\n".join(_without_margin(body, before))
        nested = _blocks(inner, language) if mark in _MARKDOWN or (not mark and len(fence) > 3) else []
        found += nested or [_Block(mark, inner)]
    return found


def _begin(line: str) -> tuple[str, str, str, str | None] | None:
    """Splits a line that begins a block: text before the fence, the fence, the mark, and code after it, if any."""
    match = _BEGIN.fullmatch(line)
    if match is None:
        return None
    before, fence, mark, rest = (match[name] for name in ("before", "fence", "mark", "rest"))
    mark = mark.lower().strip("{.")
    if _CODE_BEGINS.match(rest):
        return before, fence, mark, rest.strip()
    if fence[0] in rest or not _ATTRIBUTES.fullmatch(rest):
        return None  # a few words between fences
    is_alone = _MARGIN.fullmatch(before) is not None
    return (before, fence, mark, None) if is_alone or not rest.strip() else None


def _until_end(lines: list[str], fence: str, *, is_python: bool) -> tuple[int, str, int]:
    """Whole lines of a block's text, the part of one more line, and the lines (0 or 1) that its end takes."""
    bare = re.compile(rf"{_MARGIN.pattern}{re.escape(fence[0])}{{{len(fence)},}}(?:[ \t.,;:!?]|</?\w+>)*")
    trailing = re.compile(rf"(.*[^\s{re.escape(fence[0])}].*?){re.escape(fence[0])}{{{len(fence)},}}[ \t]*")
    quote, first_bare = "", None
    for number, line in enumerate(lines):
        if bare.fullmatch(line):
            if not quote:
                return number, "", 1
            first_bare = number if first_bare is None else first_bare
        elif not quote and (_begins_marked(line) or line.strip() == _THOUGHT):
            return number, "", 0
        elif match := trailing.fullmatch(line):
            after, is_comment = _quote_after(match[1], quote) if is_python else ("", False)
            if not after and not is_comment:
                return number, match[1], 1
        if is_python:
            quote, _ = _quote_after(line, quote)
    if first_bare is not None:  # a string that never ends is no string
        return first_bare, "", 1
    return len(lines), "", 0


def _begins_marked(line: str) -> bool:
    begin = _begin(line)
    return begin is not None and bool(begin[2]) and begin[3] is None and _MARGIN.fullmatch(begin[0]) is not None


def _quote_after(line: str, quote: str) -> tuple[str, bool]:
    """The triple quote that is open behind a line of Python, or "", and whether the line ends in a comment."""
    at = 0
    while True:
        if quote:
            end = line.find(quote, at)
            if end == -1:
                return quote, False
            quote, at = "", end + len(quote)
        match = _QUOTES.search(line, at)
        if match is None or match[0] == "#":
            return "", match is not None
        quote, at = (match[0], match.end()) if match[0] in ('"""', "'''") else ("", match.end())


def _without_margin(body: list[str], before: str) -> list[str]:
    """A block's lines without what they have for the list, the quotation or the indentation that the block is in."""
    if not (before and _MARGIN.fullmatch(before)):
        return body
    if ">" in before:
        body = [re.sub(r"^[ \t]*>[ \t]?", "", line) for line in body]
    return textwrap.dedent("\n".join(body)).split("\n")
