"""Grades a multiple-choice response by its letter: ``gtpo_megatron.rewards.multiple_choice:multiple_choice``."""

import re

from gtpo_megatron.errors import DataError
from gtpo_megatron.rewards import final_answer as final_answers

_FONT = r"\\(?:(?:text|math)(?:bf|rm|it|sf|tt|normal)?|mbox|operatorname)\s*"
_FONT_LETTER = re.compile(_FONT + r"\{\s*([A-Za-z])\s*\}")
_PRESENTATION = re.compile(_FONT + r"(?=\{)|\\[()\[\]]|[$*]")
_SPACE = re.compile(r"\\[ ,;:!]|~")

_FIRST = re.compile(r"[(\[{\s]*([A-Za-z])(?:[)\]}\s]*[)\]}]|(?=\s*(?:[.:,]|$)))")
"""A letter alone, in brackets or before a mark: ``B``, ``(B)``, ``B. 12``; not ``B 12``, ``Blue``."""

_LISTED = re.compile(
    r"\s*(?:[,;/|&+]|(?:and|or)\b|[.:](?=[A-Za-z]\b|\s*[A-J]\s*$))\s*(?:(?:and|or)\b\s*)?"
    r"[A-Ja-j](?=\s*(?:$|[,;/|&+.:)\]]|(?:and|or)\b))"
)
"""Right after the first letter: ``, B``, ``or B``, ``/B``; not ``, a triangle``, ``. x``."""
_BRACKETED = re.compile(r"(?<![\w\\])[(\[]\s*[A-Ja-j]\s*[)\]]")
"""``(B)``, but not in ``f(a)``."""
_LABEL = {
    True: re.compile(r"(?<![\w.(\[\\])[A-J]\s*[).:](?!\w)"),
    False: re.compile(r"(?<![\w.(\[\\])[a-j]\s*[).:](?!\w)"),
}
"""``B. 4`` or ``B) 4``, by whether the first letter is in upper case; not ``e.g.``."""


def multiple_choice(response: str, answer: str) -> float:
    r"""1 if the letter of the response's final answer is that of the reference, else 0.

    The final answer is the last ``\boxed{...}`` or the last line ``Answer: ...``; of what follows the letter and a mark
    (``(B) 12 apples``) only whether another choice is in it is looked at. No letter is a wrong answer, and so are
    several: a response that lists all choices has made none.

    Raises:
        DataError: the reference is not a choice.
    """
    reference = _letter(answer)
    if reference is None:
        raise DataError(f"the reference answer {answer!r} is no choice; expected a letter such as B or (B)")
    return float(final_answer(response) == reference)


def final_answer(response: str) -> str | None:
    """The chosen letter, in upper case; None where there is none, or more than one."""
    given = final_answers.final_answer(response)
    return None if given is None else _letter(given)


def _letter(text: str) -> str | None:
    plain = _SPACE.sub(" ", _PRESENTATION.sub("", _FONT_LETTER.sub(r"(\1)", text))).strip()
    first = _FIRST.match(plain)
    if first is None:
        return None
    rest = plain[first.end() :]
    is_several = _LISTED.match(rest) or _BRACKETED.search(rest) or _LABEL[first[1].isupper()].search(rest)
    return None if is_several else first[1].upper()
