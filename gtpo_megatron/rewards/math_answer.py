r"""Grades a response's final answer against a reference answer with math-verify.

math-verify takes a second to import; it is imported with the module, before the time of a worker's first row starts.
"""

import functools
import logging
import re
from typing import Any

import math_verify

from gtpo_megatron.errors import DataError
from gtpo_megatron.rewards.final_answer import final_answer, last_boxed
from gtpo_megatron.rewards.magnitude import is_too_large

__all__ = ["final_answer", "math_answer"]

# Suppresses its warning that its SIGALRM limit is off.
logging.getLogger("math_verify").setLevel(logging.ERROR)

MAX_ANSWER_CHARACTERS = 2_000
"""A longer answer is incorrect without parsing, which takes more than linear time."""

_PLAIN_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]{0,8})")


def math_answer(response: str, answer: str) -> float:
    r"""1 if the final answer of the response equals the reference, else 0.

    The final answer is the last ``\boxed{...}`` or the last line ``Answer: ...``, see :func:`final_answer`. A response
    without one, or with one that does not parse or has more than 10,000 digits, is incorrect. The caller must set a
    time limit.

    Args:
        response: the sampled text.
        answer: the reference, as text or LaTeX, with or without ``\boxed`` or dollars; or a solution that ends with
            one in ``\boxed`` or after ``####``.

    Returns:
        1.0 or 0.0.

    Raises:
        DataError: the reference answer is empty, cannot be parsed, or is a number too large to compare with this one.
    """
    reference = _unwrapped(answer.strip())
    if not reference:
        raise DataError(f"the reference answer is empty, got {answer!r}; every row needs an answer to grade against")
    given = final_answer(response)
    if given is None or len(given) > MAX_ANSWER_CHARACTERS:
        return 0.0
    # Two shortcuts that avoid the parser; tests check that math-verify gives the same result.
    if given == reference:
        return 1.0
    if _PLAIN_INTEGER.fullmatch(given) and _PLAIN_INTEGER.fullmatch(reference):
        return float(int(given) == int(reference))
    if is_too_large(reference):
        if _squeezed(given) == _squeezed(reference):
            return 1.0
        raise DataError(
            f"the reference answer {answer!r} is a number too large to compare; only its own text equals it"
        )
    if is_too_large(given):
        return 0.0
    if not _parse(reference):
        raise DataError(f"math-verify cannot parse the reference answer {answer!r}; fix the row or drop it")
    return float(_is_equal(reference, given))


def _squeezed(text: str) -> str:
    return re.sub(r"[\s{}]", "", text)


def _unwrapped(reference: str) -> str:
    """The reference without a box, dollar signs or a full stop around it; of GSM8K's, what follows ``####``."""
    reference = reference.rpartition("####")[2].strip()
    boxed = last_boxed(reference)
    return (reference.strip("$") if boxed is None else boxed).strip().rstrip(".").strip("$ ")


@functools.lru_cache(maxsize=4096)
def _is_equal(reference: str, given: str) -> bool:
    """Compares as mathematics; cached, because a group's responses have few different answers."""
    return bool(math_verify.verify(list(_parse(reference)), list(_parse(given)), timeout_seconds=None))


@functools.lru_cache(maxsize=4096)
def _parse(content: str) -> tuple[Any, ...]:
    """Parses an answer; cached, because the responses to a problem share its reference."""
    return tuple(math_verify.parse(f"\\boxed{{{content}}}", parsing_timeout=None))
