"""Grades a multiple-choice response by its letter: ``gtpo_megatron.rewards.multiple_choice:multiple_choice``."""

import re

from gtpo_megatron.errors import DataError
from gtpo_megatron.rewards import final_answer as final_answers
from gtpo_megatron.rewards.function import states

_FONT = r"\\(?:(?:text|math)(?:bf|rm|it|sf|tt|normal)?|mbox|operatorname)\s*"
_FONT_LETTER = re.compile(_FONT + r"\{\s*([A-Za-z])\s*\}")
_PRESENTATION = re.compile(_FONT + r"(?=\{)|\\[()\[\]]|[$*]")
_SPACE = re.compile(r"\\[ ,;:!]|~")

_FIRST = re.compile(r"[(\[{\s]*([A-Za-z])(?:[)\]}\s]*[)\]}]|(?=\s*(?:[.:,]|$)))")
"""A letter alone, in brackets or before a mark: ``B``, ``(B)``, ``B. 12``; not ``B 12``, ``Blue``."""

_LISTED = re.compile(
    r"\s*(?:[,;/|&+]|(?:and|or)\b|[.:](?=[A-Za-z]\b|\s*[A-J]\s*$))\s*(?:(?:and|or)\b\s*)?"
    r"([A-Ja-j])(?=\s*(?:$|[,;/|&+.:)\]]|(?:and|or)\b))"
)
"""Right after the first letter: ``, B``, ``or B``, ``/B``; not ``, a triangle``, ``. x``."""
_BRACKETED = re.compile(r"(?<![\w\\])[(\[]\s*([A-Ja-j])\s*[)\]]")
"""``(B)``, but not in ``f(a)``."""
_INITIALS = re.compile(r"[\s.:)\]}]*(?:[A-Z]\.\s*)+(?=[A-Za-z]{2})")
"""Right after the first letter, of a name: ``. C. elegans``, ``) J. S. Bach``."""
_ENDS_IN_WORD = re.compile(r"[A-Za-z]\s*$")
_LABEL = {
    True: re.compile(r"(?<![\w.(\[\\])([A-J])\s*[).:](?!\w)"),
    False: re.compile(r"(?<![\w.(\[\\])([a-j])\s*[).:](?!\w)"),
}
"""``B. 4`` or ``B) 4``, by whether the first letter is in upper case; not ``e.g.``."""


def complaint(answer: str) -> str:
    """Why no response could earn a reference answer; "" if it is one choice."""
    if _letter(answer) is None:
        return f"the reference answer {answer!r} is no choice; expected one letter such as B or (B)"
    return ""


@states(answer_complaint=complaint)
def multiple_choice(response: str, answer: str) -> float:
    r"""1 if the letter of the response's final answer is that of the reference, else 0.

    The final answer is the last ``\boxed{...}`` or the last line ``Answer: ...``. Text after the letter and a mark
    (``(B) 12 apples``) is ignored unless it names another choice. No letter, or several, is incorrect.

    Raises:
        DataError: the reference is not a choice.
    """
    if reason := complaint(answer):
        raise DataError(reason)
    return float(final_answer(response) == _letter(answer))


def final_answer(response: str) -> str | None:
    """The chosen letter in upper case; None if there is none, or more than one."""
    given = final_answers.final_answer(response)
    return None if given is None else _letter(given)


def _letter(text: str) -> str | None:
    plain = _SPACE.sub(" ", _PRESENTATION.sub("", _FONT_LETTER.sub(r"(\1)", text))).strip()
    first = _FIRST.match(plain)
    if first is None:
        return None
    return None if _names_another(first, plain[first.end() :]) else first[1].upper()


def _names_another(first: re.Match[str], rest: str) -> bool:
    """Whether another choice follows the first one.

    A letter after a word belongs to the choice's text (``Group (A) elements``, ``Type A: common``), unless it is the
    next one of the alphabet, in brackets: ``(A) apples (B) pears``.
    """
    letter = first[1].upper()
    rest = _INITIALS.sub("", rest, count=1) if _INITIALS.match(rest) else rest
    listed = _LISTED.match(rest)
    if listed is not None and listed[1].upper() != letter:
        return True
    for pattern in (_BRACKETED, _LABEL[first[1].isupper()]):
        for found in pattern.finditer(rest):
            other = found[1].upper()
            is_next = pattern is _BRACKETED and ord(other) == ord(letter) + 1
            if other != letter and (is_next or not _ENDS_IN_WORD.search(rest[: found.start()])):
                return True
    return False
