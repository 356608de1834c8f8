"""Checks whether a response follows what its prompt asked for: ``gtpo_megatron.rewards.instructions:all_followed``.

A row has ``constraints``: objects with a ``kind``, one of :data:`CHECKS`, and what that kind needs. The checks are
exact, as IFEval's strict ones (arXiv 2311.07911): the response counts as it stands, but for white space at its ends. An
empty response follows nothing.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from gtpo_megatron.errors import DataError
from gtpo_megatron.rewards.function import states
from gtpo_megatron.rewards.request import Reward, RewardRequest
from gtpo_megatron.untrusted.json_text import parse_json
from gtpo_megatron.untrusted.text import shown

_SENTENCE_END = re.compile(r"[.!?\u2026\u3002\uff01\uff1f]+[\"'\u201d\u2019)\]]*(?=\s|$)")
_BULLET = re.compile(r"^[ \t]*[*-][ \t]+\S", re.MULTILINE)
_NUMBERED = re.compile(r"^[ \t]*(\d{1,3})[.)][ \t]+\S", re.MULTILINE)
_TITLE = re.compile(r"<<[^<>\n]*\w[^<>\n]*>>")
_WORD = re.compile(r"\w+(?:['\u2019]\w+)*")
_QUOTES = {'"': '"', "\u201c": "\u201d"}
_COMMAS = ",\uff0c\u3001\u060c"
"""Latin, Chinese, Japanese and Arabic."""

Constraint = Mapping[str, Any]


def num_words(text: str) -> int:
    """Pieces between white space that have a letter or a digit: ``well-known`` is one, a dash is none."""
    return sum(any(map(str.isalnum, piece)) for piece in text.split())


def num_sentences(text: str) -> int:
    """Pieces with a letter or a digit that end in a full stop, ``!`` or ``?`` before white space, or at the end."""
    return sum(any(map(str.isalnum, piece)) for piece in _SENTENCE_END.split(text))


def count_word(text: str, word: str) -> int:
    """How often a whole word is there, in any case."""
    return sum(found.casefold() == word.casefold() for found in _WORD.findall(text))


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
    "start": lambda text, asked: text.startswith(asked["text"]),
    "end": lambda text, asked: text.endswith(asked["text"]),
    "no_comma": lambda text, _: not any(mark in text for mark in _COMMAS),
}
"""The check of each kind: ``(response without white space at its ends, constraint)``."""

_NUMBER: dict[str, type] = {"num": int}
_WORD_NEEDED: dict[str, type] = {"word": str}
_TEXT_NEEDED: dict[str, type] = {"text": str}

_NEEDED: dict[str, dict[str, type]] = {
    "max_words": _NUMBER,
    "min_words": _NUMBER,
    "sentences": _NUMBER,
    "paragraphs": _NUMBER,
    "bullets": _NUMBER,
    "numbered": _NUMBER,
    "include": _WORD_NEEDED,
    "exclude": _WORD_NEEDED,
    "start": _TEXT_NEEDED,
    "end": _TEXT_NEEDED,
    "times": _WORD_NEEDED | _NUMBER,
    "letter": {"letter": str} | _NUMBER,
}


def complaint(columns: Mapping[str, Any]) -> str:
    """Why a row cannot be graded; "" if it can."""
    constraints = columns.get("constraints")
    if not isinstance(constraints, list) or not constraints:
        return f"constraints is {shown(constraints)}; expected a list of objects, each with a kind"
    for one in constraints:
        kind = one.get("kind") if isinstance(one, Mapping) else None
        if kind not in CHECKS:
            return f"constraints has {shown(one)}; expected an object with one of the kinds {', '.join(CHECKS)}"
        for name, wanted in _NEEDED.get(kind, {}).items():
            if not isinstance(one.get(name), wanted) or isinstance(one[name], bool):
                return f"constraints has {shown(one)}; {kind} needs {name}, {'a text' if wanted is str else 'a number'}"
    return ""


@states(success_threshold=1.0, columns=("constraints",), complaint=complaint)
def all_followed(request: RewardRequest) -> Reward:
    """1 if the response follows all constraints of its row, else 0.

    Parts: ``followed``, the fraction of them, and each kind that the row has, 1 or 0.

    Raises:
        DataError: the row has no constraints, or one that cannot be checked.
    """
    if reason := complaint(request.columns):
        raise DataError(reason)
    text = request.response.strip()
    found = {one["kind"]: bool(text) and CHECKS[one["kind"]](text, one) for one in request.columns["constraints"]}
    followed = sum(found.values()) / len(found)
    parts = {"followed": followed} | {kind: float(is_met) for kind, is_met in found.items()}
    return Reward(float(followed == 1.0), parts, {"missed": [kind for kind, is_met in found.items() if not is_met]})
