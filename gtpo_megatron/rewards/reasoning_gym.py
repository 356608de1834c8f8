"""Grades answers to reasoning-gym's tasks by their own scorers: ``gtpo_megatron.rewards.reasoning_gym:task_score``."""

import ast
import math
import re
import sys
from collections import deque
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from gtpo_megatron.config.reasoning_task import gym_version, reasoning_task
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.rewards import final_answer as final_answers
from gtpo_megatron.rewards.function import states
from gtpo_megatron.rewards.math_answer import math_answer
from gtpo_megatron.rewards.request import Reward, RewardRequest
from gtpo_megatron.untrusted.text import printable, shown
from gtpo_megatron.untrusted.thinking import split_thinking

gym_version()
import reasoning_gym  # noqa: E402, F401 - takes seconds, which no row's limit should have to bear

FULL_SCORE_TOLERANCE = 1e-6
"""A score within this of 1 is 1."""

TASKS = 1_024
"""Tasks with their options that a process keeps: all of reasoning-gym's with several options each."""

EVALUATED = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""Tasks whose scorer passes the answer to ``eval``; it is given ``ast.literal_eval`` in its place."""

PARSED = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)
"""Tasks whose scorer passes the answer to sympy's ``parse_expr``, which runs it: only expressions come so far.

``Integral`` is none of their functions: the derivative of an unsolved integral is right whatever was asked.
"""

TUPLES = frozenset({"arc_agi", "rearc"})
"""Tasks whose scorer compares with tuples, which are lists in a row's columns."""

LONGEST_EXPRESSION = 1_000
_FUNCTIONS = "a?(?:sin|cos|tan|cot|sec|csc)h?|exp|log|ln|sqrt|pi|Abs"  # what integrals are made of
_EXPRESSION = re.compile(rf"(?:[\s\d+\-*/^(),]|\.(?!\s*[^\W\d])|(?<![^\W\d_])(?:{_FUNCTIONS}|[^\W\d_])(?!\w))+")

_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE)
_TEXT = re.compile(r"\\(?:text|mathrm|mathbf|textbf)\{([^{}]*)\}")
_MINUS = "\u2212\u2010\u2011\u2013\ufe63"
_NUMBER = re.compile(rf"(?<![\d.])[-{_MINUS}]?\d+(?:,\d{{3}})*(?:\.\d+)?")
_ANSWER_LINE = re.compile(r"\banswer:", re.IGNORECASE)


def complaint(columns: Mapping[str, Any]) -> str:
    """Why a row cannot be graded; "" if it can."""
    task = columns.get("task")
    if not isinstance(task, Mapping) or not _is_task(task):
        return ""
    if not isinstance(columns.get("metadata"), Mapping):
        return f"metadata is {shown(columns.get('metadata'))}; expected what reasoning-gym's entry has"
    try:
        _task(task["name"], tuple(task["options"].items()))
    except ConfigError as error:
        return str(error)
    return ""


@states(success_threshold=1.0, complaint=complaint)
def task_score(request: RewardRequest) -> Reward:
    r"""The score of the response's answer by the row's task, from 0 to 1; correct if it is 1.

    The answer is looked for where the prompt asks for it, see :func:`answer_asked_for`. A row of another data set, with
    no task of reasoning-gym in its columns, is graded as mathematics.

    Parts: ``accuracy``, 1 if the answer is correct, else 0; ``answered``, whether there is an answer;
    ``scorer_raised``, whether the scorer did. An answer at which it raises is wrong, and the info says what it raised.
    """
    task = request.columns.get("task")
    if not isinstance(task, Mapping) or not _is_task(task):
        reward = math_answer(request.response, request.answer)
        return Reward(reward, {"accuracy": float(reward >= 1.0)})
    is_number = _NUMBER.fullmatch(str(request.columns.get("answer"))) is not None
    answer = answer_asked_for(request.prompt_text, request.response, content=request.content, is_number=is_number)
    score, info = 0.0, {"answer": shown(answer)}
    if answer is not None:
        try:
            score = _score(task, answer, request.columns)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - scorers read answers with int() and the like
            info["scorer"] = f"{type(error).__name__}: {printable(error)}"
    if math.isclose(score, 1.0, abs_tol=FULL_SCORE_TOLERANCE):
        score = 1.0
    parts = {"accuracy": float(score == 1.0), "answered": float(answer is not None)}
    return Reward(score, parts | {"scorer_raised": float("scorer" in info)}, info)


def answer_asked_for(prompt: str, response: str, *, content: str | None = None, is_number: bool = False) -> str | None:
    r"""The answer of a response, in the form that its prompt asks for last; None if it is not there.

    - ``<answer>``: what is between the last pair of these tags;
    - ``\boxed``: the last box, or the last line ``Answer: ...`` if there is no box;
    - ``Answer:``: the last such line, or the last box, whichever is later;
    - none of them: the last number of ``content`` if ``is_number``, which the reference is, with any of Unicode's minus
      signs; else all of ``content``.

    White space at the ends is removed, and from a whole content also a last full stop.

    Args:
        prompt: the prompt as text.
        response: the sampled text.
        content: the response without its thinking; None: the response has none.
        is_number: whether the reference is a number.
    """
    content = response if content is None else content
    line = max((found.start() for found in _ANSWER_LINE.finditer(prompt)), default=-1)
    places = {"tags": prompt.rfind("<answer>"), "box": prompt.rfind("\\boxed"), "line": line}
    form, place = max(places.items(), key=lambda one: one[1])
    if place < 0 and is_number:
        last = next(iter(deque(_NUMBER.findall(content), maxlen=1)), None)
        return last and last.translate(dict.fromkeys(map(ord, _MINUS), "-"))
    if place < 0:
        return content.strip().removesuffix(".") or None
    if form == "tags":
        return _between_tags(response)
    if form == "box" and (boxed := final_answers.last_boxed(response)) is not None:
        return _TEXT.sub(r"\1", boxed).strip(" \t\r\n$") or None
    return final_answers.final_answer(response)


def final_answer(response: str) -> str | None:
    """What a response answers, in whichever form, for maj@k."""
    found = _between_tags(response) or final_answers.final_answer(response)
    return found or split_thinking(response)[1].strip().removesuffix(".") or None


def _between_tags(response: str) -> str | None:
    found = _TAGGED.findall(response)
    return (found[-1].strip() or None) if found else None


def _is_task(task: Mapping[str, Any]) -> bool:
    name, options = task.get("name"), task.get("options")
    return (
        isinstance(name, str) and isinstance(options, Mapping) and all(isinstance(one, str) for one in options.values())
    )


def _score(task: Mapping[str, Any], answer: str, columns: Mapping[str, Any]) -> float:
    name = task["name"]
    if name in PARSED and not is_expression(answer):
        return 0.0
    metadata = _tuples(columns["metadata"]) if name in TUPLES else columns["metadata"]
    entry = {"question": "", "answer": columns.get("answer"), "metadata": metadata}
    score = float(_task(name, tuple(task["options"].items())).score_answer(answer, entry))
    return min(max(score, 0.0), 1.0)


def is_expression(answer: str) -> bool:
    """Whether a text is numbers, single letters, the usual functions and operators alone: nothing that could run."""
    return len(answer) <= LONGEST_EXPRESSION and _EXPRESSION.fullmatch(answer) is not None


@lru_cache(maxsize=TASKS)
def _task(name: str, options: tuple[tuple[str, str], ...]) -> Any:
    """The task, with a scorer that runs nothing of an answer.

    Args:
        name: name of the task.
        options: its options as text.

    Raises:
        ConfigError: there is no such task, or it refuses its options.
    """
    task = reasoning_task(name, dict(options))
    if name in EVALUATED:
        vars(sys.modules[type(task).__module__])["eval"] = ast.literal_eval
    return task


def _tuples(value: Any) -> Any:
    """Lists as tuples, inside of objects too."""
    if isinstance(value, Mapping):
        return {key: _tuples(child) for key, child in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
