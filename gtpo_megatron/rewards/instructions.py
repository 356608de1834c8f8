"""Checks whether a response follows what its prompt asked for: ``gtpo_megatron.rewards.instructions:all_followed``.

A row has ``constraints``: objects with a ``kind``, one of :data:`CHECKS`, and what that kind needs; of one kind there
may be several. The checks are exact, as IFEval's strict ones (arXiv 2311.07911): the response counts as it stands, but
for white space at its ends. An empty response follows nothing. Letters with accents may be written in either of
Unicode's ways.
"""

import json
import re
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any

from gtpo_megatron.errors import DataError
from gtpo_megatron.rewards.function import states
from gtpo_megatron.rewards.request import Reward, RewardRequest
from gtpo_megatron.untrusted.json_text import parse_json
from gtpo_megatron.untrusted.text import shown

_CLOSING = "[\"'\u201d\u2019)\\]*_`\u00bb\u300d\u300f]*"
_SENTENCE_END = re.compile(rf"[.!?\u2026\u0964\u061f]+{_CLOSING}(?=\s|$)|[\u3002\uff01\uff1f]+{_CLOSING}")
_LIST_NUMBER = re.compile(r"^[ \t]*\d{1,3}[.)](?=[ \t])", re.MULTILINE)
_BULLET = re.compile(r"^[ \t]*[*-][ \t]+(?![* \t-]*$)\S", re.MULTILINE)
_NUMBERED = re.compile(r"^[ \t]*(\d{1,3})[.)][ \t]+\S", re.MULTILINE)
_TITLE = re.compile(r"<<[^<>\n]*\w[^<>\n]*>>")
_SIGNS = "\u3005\u3041-\u3096\u30a1-\u30fa\u30fc\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
"""Chinese and Japanese: each is counted as a word."""
_LETTERS = rf"[^\W_{_SIGNS}]+"
_WORD = re.compile(rf"[{_SIGNS}]|{_LETTERS}(?:(?:['\u2019-]|(?<=\d)[.,](?=\d)){_LETTERS})*")
_UNSPACED = frozenset({"CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR"})
"""Scripts that have no spaces between words, as the names of their letters begin."""
_APOSTROPHES = ("'", "\u2019")
_QUOTES = {'"': '"', "\u201c": "\u201d"}
_COMMAS = ",\uff0c\u3001\u060c"
"""Latin, Chinese, Japanese and Arabic."""

Constraint = Mapping[str, Any]


def num_words(text: str) -> int:
    """Runs of letters and digits: ``well-known``, ``it's`` and ``3.5`` are one, a dash is none, ``a/b`` are two."""
    return len(_WORD.findall("".join(char for char in text if not _is_mark(char))))


def num_sentences(text: str) -> int:
    """Pieces with a letter or a digit that end in a full stop, ``!`` or ``?`` before white space, or at the end.

    A list's numbers at the beginning of lines are none.
    """
    pieces = _SENTENCE_END.split(_LIST_NUMBER.sub("", text))
    return sum(any(map(str.isalnum, piece)) for piece in pieces)


def count_word(text: str, word: str) -> int:
    """How often a word, or several, is there in any case, and is no part of another: ``it's`` is not ``it``."""
    folded = text.casefold()
    found = re.finditer(re.escape(word.casefold()), folded)
    return sum(_ends_word(folded, one.start()) and _ends_word(folded, one.end()) for one in found)


def _ends_word(text: str, index: int) -> bool:
    """Whether no word goes on over this place; in scripts without spaces one may end anywhere."""
    before, after = text[max(0, index - 2) : index], text[index : index + 2]
    if after and _is_mark(after[0]):
        return False
    if before[-1:] in _APOSTROPHES:
        before = before[:-1]
    elif after[:1] in _APOSTROPHES:
        after = after[1:]
    sides = before[-1:], after[:1]
    return not all(map(_is_of_word, sides)) or any(map(_is_unspaced, sides))


def _is_of_word(char: str) -> bool:
    return char.isalnum() or _is_mark(char)


def _is_mark(char: str) -> bool:
    return bool(char) and unicodedata.category(char).startswith("M")


def _is_unspaced(char: str) -> bool:
    return unicodedata.name(char, "").partition(" ")[0] in _UNSPACED


def _begins_with(text: str, beginning: str) -> bool:
    return text.startswith(beginning) and _ends_word(text, len(beginning))


def _closes_with(text: str, end: str) -> bool:
    return text.endswith(end) and _ends_word(text, len(text) - len(end))


def _paragraphs(text: str) -> int:
    return len([part for part in re.split(r"\n[ \t]*\n", text) if part.strip()])


def _is_numbered(text: str, num: int) -> bool:
    """Every line that is not empty is numbered, from 1 on without a gap."""
    lines = [line for line in text.splitlines() if line.strip()]
    found = [_NUMBERED.match(line) for line in lines]
    return [one and int(one[1]) for one in found] == list(range(1, num + 1))


def _is_json(text: str) -> bool:
    """A JSON object; NaN and infinities are none of JSON's."""
    try:
        value = parse_json(text, "")
        json.dumps(value, allow_nan=False)
    except (DataError, ValueError):
        return False
    return isinstance(value, dict)


def _is_quoted(text: str) -> bool:
    inside = text[1:-1]
    return (
        len(text) > 2
        and _QUOTES.get(text[0]) == text[-1]
        and bool(inside.strip())
        and not any(mark in inside for mark in (text[0], text[-1]))
    )


CHECKS: dict[str, Callable[[str, Constraint], bool]] = {
    "max_words": lambda text, asked: 0 < num_words(text) <= asked["num"],
    "min_words": lambda text, asked: num_words(text) >= asked["num"],
    "sentences": lambda text, asked: num_sentences(text) == asked["num"],
    "paragraphs": lambda text, asked: _paragraphs(text) == asked["num"],
    "lowercase": lambda text, _: text == text.lower() and any(map(str.islower, text)),
    "uppercase": lambda text, _: text == text.upper() and any(map(str.isupper, text)),
    "bullets": lambda text, asked: len(_BULLET.findall(text)) == asked["num"],
    "numbered": lambda text, asked: _is_numbered(text, asked["num"]),
    "json": lambda text, _: _is_json(text),
    "title": lambda text, _: _TITLE.match(text) is not None,
    "quoted": lambda text, _: _is_quoted(text),
    "include": lambda text, asked: count_word(text, asked["word"]) > 0,
    "exclude": lambda text, asked: count_word(text, asked["word"]) == 0,
    "times": lambda text, asked: count_word(text, asked["word"]) >= asked["num"],
    "letter": lambda text, asked: text.casefold().count(asked["letter"].casefold()) >= asked["num"],
    "start": lambda text, asked: _begins_with(text, asked["text"]),
    "end": lambda text, asked: _closes_with(text, asked["text"]),
    "no_comma": lambda text, _: not any(mark in text for mark in _COMMAS),
}
"""The check of each kind: ``(response without white space at its ends, constraint)``."""

_NEEDED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("max_words", "min_words", "sentences", "paragraphs", "bullets", "numbered"), ("num",)),
    **dict.fromkeys(("include", "exclude"), ("word",)),
    **dict.fromkeys(("start", "end"), ("text",)),
    "times": ("word", "num"),
    "letter": ("letter", "num"),
}
"""What a kind needs besides: a number, ``num``, or a text."""


def complaint(columns: Mapping[str, Any]) -> str:
    """Why a row cannot be graded; "" if it can."""
    constraints = columns.get("constraints")
    if not isinstance(constraints, list) or not constraints:
        return f"constraints is {shown(constraints)}; expected a list of objects, each with a kind"
    for one in constraints:
        kind = one.get("kind") if isinstance(one, Mapping) else None
        if not isinstance(kind, str) or kind not in CHECKS:
            return f"constraints has {shown(one)}; expected an object with one of the kinds {', '.join(CHECKS)}"
        for name in _NEEDED.get(kind, ()):
            if not (_is_count if name == "num" else _is_text)(one.get(name)):
                wanted = "a whole number above 0" if name == "num" else "a text"
                return f"constraints has {shown(one)}; {kind} needs {name}, {wanted}"
    return ""


def _is_count(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 1 and value == value // 1


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _prepared(value: object) -> Any:
    """Texts with composed letters, numbers whole: tables write 10 as 10.0."""
    if isinstance(value, str):
        return unicodedata.normalize("NFC", value)
    return int(value) if isinstance(value, float) else value


@states(success_threshold=1.0, columns=("constraints",), complaint=complaint)
def all_followed(request: RewardRequest) -> Reward:
    """1 if the response, without its thinking, follows all constraints of its row, else 0.

    Parts: ``followed``, the fraction of them, and each kind that the row has: 1 if all constraints of that kind are
    followed, else 0.

    Raises:
        DataError: the row has no constraints, or one that cannot be checked.
    """
    if reason := complaint(request.columns):
        raise DataError(reason)
    text = _prepared(request.content.strip())
    constraints = [{name: _prepared(value) for name, value in one.items()} for one in request.columns["constraints"]]
    met = [(one["kind"], bool(text) and CHECKS[one["kind"]](text, one)) for one in constraints]
    followed = sum(is_met for _, is_met in met) / len(met)
    missed = list(dict.fromkeys(kind for kind, is_met in met if not is_met))
    parts = {"followed": followed} | {kind: float(kind not in missed) for kind, _ in met}
    return Reward(float(not missed), parts, {"missed": missed})
