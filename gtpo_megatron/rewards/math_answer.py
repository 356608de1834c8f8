r"""Grades a response's final answer against a reference answer.

The answer is normalised by a table of rules, its structure is read, and the parts are compared: numbers exactly,
expressions by their values; see :mod:`gtpo_megatron.rewards.answers`. latex2sympy reads expressions; it takes a second
to import and is imported with the module, before the time of a worker's first row starts.
"""

import functools
import re
from collections.abc import Iterator

from gtpo_megatron.config.reward import RewardConfig
from gtpo_megatron.errors import DataError
from gtpo_megatron.rewards.answers.comparison import equal
from gtpo_megatron.rewards.answers.groups import without_groups
from gtpo_megatron.rewards.answers.reading import is_readable, read
from gtpo_megatron.rewards.answers.rules import normalised
from gtpo_megatron.rewards.answers.time_limit import within
from gtpo_megatron.rewards.final_answer import boxed_answer, final_answer
from gtpo_megatron.rewards.function import states
from gtpo_megatron.rewards.magnitude import is_too_large

__all__ = ["final_answer", "math_answer"]

MAX_ANSWER_CHARACTERS = 2_000
"""A longer answer is incorrect without parsing, which takes more than linear time."""

LIMIT_S = RewardConfig().timeout_s
"""Seconds that one comparison may take wherever it is called; the processes of a run have their own limit per row."""

_PLAIN_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]{0,8})")
_SIGNED_E = re.compile(r"(?<![\w.])(\d+)e([-+]\d+)(?![\w.])")
_FONT = r"\\(?:text|math)(?:bf|rm|it|sf)?\s*\{\s*"
_GAP = r"(?:\s|\\[ ,;:]|\\q?quad(?![A-Za-z])|~)"
_LABEL = re.compile(
    rf"(?:{_FONT}(?:\((?P<marked>[A-Z])\)|(?P<half>[A-Z])[).:])[.:]?{_GAP}*\}}{_GAP}*"
    rf"|(?:{_FONT}(?P<bare>[A-Z])\s*\}}|\((?P<round>[A-Z])\)|(?P<plain>[A-Z])[.)]){_GAP}+)(?P<content>\S.*)",
    re.DOTALL,
)
_ALL_IN_FONT = re.compile(rf"{_FONT}(?P<inside>(?:\([A-Z]\)|[A-Z][.):]){_GAP}+[^{{}}]*)\}}", re.DOTALL)
"""A label and what follows it, in one font."""


def complaint(answer: str) -> str:
    """Why no response could earn a reference answer; "" if one could: its own text in a box is graded."""
    try:
        earned = math_answer(f"\\boxed{{{_unwrapped(answer.strip())}}}", answer)
    except DataError as error:
        return str(error)
    return "" if earned else f"the reference answer {answer!r} is not even earned by its own text in a box"


@states(answer_complaint=complaint)
def math_answer(response: str, answer: str) -> float:
    r"""1 if the final answer of the response equals the reference, else 0.

    The final answer is the last ``\boxed{...}`` or the last line ``Answer: ...``, see :func:`final_answer`. A response
    without one, or with one that does not parse or has more than 10,000 digits, is incorrect.

    Args:
        response: the sampled text.
        answer: the reference, as text or LaTeX, with or without ``\boxed`` or dollars; or a solution that ends with
            one in ``\boxed`` or after ``####``.

    Returns:
        1.0 or 0.0.

    Raises:
        DataError: the reference answer is empty, cannot be read, or is a number too large to compare with this one.
        TimeoutError: the comparison took longer than ``LIMIT_S``, in any thread.
    """
    reference = _unwrapped(answer.strip())
    _check(reference, answer)
    given = final_answer(response)
    if given is None or len(given) > MAX_ANSWER_CHARACTERS:
        return 0.0
    # Two shortcuts that avoid reading; tests check that reading gives the same result.
    if given == reference:
        return 1.0
    if _PLAIN_INTEGER.fullmatch(given) and _PLAIN_INTEGER.fullmatch(reference):
        return float(int(given) == int(reference))
    if _is_too_large(reference):
        if _squeezed(given) == _squeezed(reference):
            return 1.0
        raise DataError(
            f"the reference answer {answer!r} is a number too large to compare; only its own text equals it"
        )
    if not is_readable(given) or _is_too_large(given):
        return 0.0
    return float(_is_equal(reference, given))


def _is_too_large(answer: str) -> bool:
    """Whether it is as it is written, or without what hides a power: ``{10}^{{10^{10}}}``."""
    return is_too_large(answer) or is_too_large(normalised(answer))


def _check(reference: str, answer: str) -> None:
    if not reference:
        raise DataError(f"the reference answer is empty, got {answer!r}; every row needs an answer to grade against")
    if len(reference) > MAX_ANSWER_CHARACTERS:
        raise DataError(
            f"the reference answer has {len(reference)} characters; expected at most {MAX_ANSWER_CHARACTERS}: its "
            f"final answer, or a solution that ends with it in a box"
        )
    if not is_readable(reference) or not re.search(r"[^\s{}\\$.,;:]", re.sub(r"\\(?:text|math)[a-z]*", "", reference)):
        raise DataError(f"cannot parse the reference answer {answer!r}; fix the row or drop it")


def _squeezed(text: str) -> str:
    return re.sub(r"[\s{}]", "", text)


def _unwrapped(reference: str) -> str:
    """The reference without boxes, dollar signs or a full stop around it; of GSM8K's, what follows ``####``."""
    reference = reference.rpartition("####")[2].strip()
    boxed = boxed_answer(reference)
    return (reference.strip("$") if boxed is None else boxed).strip().rstrip(".").strip("$ ")


@functools.lru_cache(maxsize=4096)
def _is_equal(reference: str, given: str) -> bool:
    """Compares as mathematics; cached, because a group's responses have few different answers."""
    label, content = _labelled(reference)
    given_label, given_content = _labelled(given)
    if label and given_label and label != given_label:
        return False

    def compared() -> bool:
        readings = [(one, other) for one in _readings(content) for other in _readings(given_content)]
        return (
            any(equal(read(one), read(other)) for one, other in readings)
            or bool(label and not given_label and normalised(given).strip("()") == label)
            or bool(given_label and not label and normalised(reference).strip("()") == given_label)
        )

    return within(LIMIT_S, compared, what="comparing an answer with its reference")


def _labelled(text: str) -> tuple[str, str]:
    """The label of a choice, as in ``(C) 5``, and what follows it; the label is empty if there is none."""
    text = without_groups(text.strip())
    in_font = _ALL_IN_FONT.fullmatch(text)
    found = _LABEL.fullmatch(in_font["inside"] if in_font else text)
    if found is None:
        return "", text
    return next(filter(None, found.group("marked", "half", "bare", "round", "plain"))), found["content"]


def _readings(text: str) -> Iterator[str]:
    """The normalised text; of ``2e-5`` also the one in which e is Euler's number."""
    yield normalised(text)
    if _SIGNED_E.search(text):
        yield normalised(_SIGNED_E.sub(r"\1e \2", text))
