"""Grades a multiple-choice response by its letter: ``gtpo_megatron.rewards.multiple_choice:multiple_choice``."""

import re

from gtpo_megatron.errors import DataError
from gtpo_megatron.rewards import final_answer as final_answers

_CHOICE = re.compile(r"(?:\\(?:text|textbf|mathrm|mathbf)\s*\{)?\s*[(\[]?\s*([A-Za-z])\s*(?:[)\].:},]|$)")
"""A letter alone, in brackets or before a mark: ``B``, ``(B)``, ``\text{(B)}``, ``B. 12``; not ``B 12``, ``Blue``."""


def multiple_choice(response: str, answer: str) -> float:
    r"""1 if the letter of the response's final answer is that of the reference, else 0.

    The final answer is the last ``\boxed{...}`` or the last line ``Answer: ...``; what follows the letter and a mark
    (``(B) 12 apples``) is not looked at. No letter is a wrong answer.

    Raises:
        DataError: the reference is not a choice.
    """
    reference = _letter(answer)
    if reference is None:
        raise DataError(f"the reference answer {answer!r} is no choice; expected a letter such as B or (B)")
    return float(final_answer(response) == reference)


def final_answer(response: str) -> str | None:
    """The chosen letter, in upper case, or None."""
    given = final_answers.final_answer(response)
    return None if given is None else _letter(given)


def _letter(text: str) -> str | None:
    found = _CHOICE.match(text.strip())
    return None if found is None else found[1].upper()
