"""A reward function: lookup by name, the three forms that it may have, and the columns that it needs."""

import contextlib
import inspect
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, TypeVar, cast

from gtpo_megatron.config.named_function import named_function, named_module
from gtpo_megatron.config.reward import RewardConfig, weighted_names
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.rewards.request import RewardRequest
from gtpo_megatron.untrusted.text import printable

logger = logging.getLogger(__name__)

EXPECTED = "(response, answer), (request) or (completions, **columns)"
"""The signatures that a reward function may have."""

_GIVEN = ("completions", "prompts")
"""Parameters of the batched form that are not columns."""

_RESPONSE = frozenset({"response", "responses", "completion", "solution_str", "prediction", "generation", "text"})
_PROMPT = frozenset({"prompt", "question", "problem", "query", "input", "messages"})
_ANSWER = frozenset({"answer", "ground_truth", "reference", "label", "target", "gold", "expected"})
"""Usual names of what a reward reads: a parameter with one of them is given that or refused."""

_STATEMENT = "__reward_statement__"

Function = TypeVar("Function", bound=Callable[..., Any])


class Form(StrEnum):
    """The signature of a reward function."""

    ANSWER = "(response, answer)"
    """One response and its reference answer."""
    REQUEST = "(request)"
    """One :class:`~gtpo_megatron.rewards.request.RewardRequest`."""
    COLUMNS = "(completions, **columns)"
    """Several responses, and of each column one value per response, as in TRL; returns a list."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Statement:
    """Statement of a reward function about itself, made with :func:`states`.

    Attributes:
        success_threshold: reward from which on a response is correct; None: the run's setting decides.
        columns: columns that every row must have.
        complaint: function of the columns of a row that returns why it cannot be graded, or "".
        answer_complaint: function of a reference answer that returns why no response could earn it, or "".
        needs_sandbox: whether it runs programs, so that a sandbox must be there before the run starts.
        needs_judge: whether it asks ``reward.judge``, which must answer before the run starts.
        fills_template: whether it asks with ``reward.judge.template``, so that rows must have what is named there.
        limit_s: seconds that grading a row may take where that is more than ``reward.timeout_s``, which is the
            request's ``limit_s``.
    """

    success_threshold: float | None = None
    columns: tuple[str, ...] = ()
    complaint: Callable[[Mapping[str, Any]], str] | None = None
    answer_complaint: Callable[[str], str] | None = None
    needs_sandbox: bool = False
    needs_judge: bool = False
    fills_template: bool = False
    limit_s: Callable[[RewardRequest], float] | None = None


def states(
    *,
    success_threshold: float | None = None,
    columns: tuple[str, ...] = (),
    complaint: Callable[[Mapping[str, Any]], str] | None = None,
    answer_complaint: Callable[[str], str] | None = None,
    needs_sandbox: bool = False,
    needs_judge: bool = False,
    fills_template: bool = False,
    limit_s: Callable[[RewardRequest], float] | None = None,
) -> Callable[[Function], Function]:
    """A decorator with which a reward function says what decides success and what it needs, see :class:`Statement`."""
    statement = Statement(
        success_threshold=success_threshold,
        columns=columns,
        complaint=complaint,
        answer_complaint=answer_complaint,
        needs_sandbox=needs_sandbox,
        needs_judge=needs_judge,
        fills_template=fills_template,
        limit_s=limit_s,
    )

    def decorate(function: Function) -> Function:
        setattr(function, _STATEMENT, statement)
        return function

    return decorate


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardFunction:
    """A function whose signature is known.

    Attributes:
        name: ``module:function`` or ``FILE.py:function``.
        function: the callable.
        form: its signature.
        is_async: whether calling it gives an awaitable.
        weight: factor in a sum of rewards.
        columns: columns that it needs; of the form ``COLUMNS``, its parameters without a default value.
        accepts: names that a function of the form ``COLUMNS`` takes; None: any.
        needs_answer: whether every row must have a reference answer.
        statement: statement of the function about itself.
    """

    name: str
    function: Callable[..., Any]
    form: Form
    is_async: bool
    weight: float
    columns: tuple[str, ...]
    accepts: frozenset[str] | None
    needs_answer: bool
    statement: Statement

    @property
    def label(self) -> str:
        """The function's own name as the name of a part."""
        return re.sub(r"[^a-z0-9_]", "_", self.name.partition(":")[2].lower()).strip("_") or "reward"

    def arguments(self, requests: Sequence[RewardRequest]) -> dict[str, Any]:
        """Keyword arguments of the form ``COLUMNS``; a row without a column has None in it.

        As in TRL, completions of chat prompts are lists of one message.
        """
        rows = [request.columns for request in requests]
        names = dict.fromkeys(name for row in rows for name in row)
        given: dict[str, Any] = {name: [row.get(name) for row in rows] for name in names}
        given["prompts"] = [
            one.prompt if isinstance(one.prompt, str) else [dict(message) for message in one.prompt] for one in requests
        ]
        given["completions"] = [
            one.response if isinstance(one.prompt, str) else [{"role": "assistant", "content": one.response}]
            for one in requests
        ]
        if self.accepts is None:
            return given
        return {name: values for name, values in given.items() if name in self.accepts}


def resolve_rewards(text: str) -> tuple[RewardFunction, ...]:
    """Imports the functions of ``reward.function`` and binds their signatures.

    Raises:
        ConfigError: a name has another form, a module does not import or lacks the function, or a signature does not
            fit.
    """
    return tuple(_resolved(name, weight) for weight, name in weighted_names(text))


def run_rewards(config: RewardConfig) -> tuple[RewardFunction, ...]:
    """The functions of a run, with what the judge's template needs of a row.

    Raises:
        ConfigError: as :func:`resolve_rewards`; or a function needs a judge, and none is configured.
    """
    return tuple(_with_judge(one, config) for one in resolve_rewards(config.function))


def _with_judge(function: RewardFunction, config: RewardConfig) -> RewardFunction:
    judge = config.judge
    if not function.statement.needs_judge:
        return function
    if not judge.url:
        raise ConfigError(
            f"reward function {function.name!r} asks a judge: set reward.judge.url, such as http://HOST:8000/v1"
        )
    if judge.timeout_s > config.timeout_s:
        raise ConfigError(
            f"reward.judge.timeout_s={judge.timeout_s:g} exceeds reward.timeout_s={config.timeout_s:g}, the limit of a "
            f"response with all of its retries: raise the second, to 300 for instance"
        )
    if not function.statement.fills_template:
        return function
    columns = tuple(dict.fromkeys((*function.columns, *judge.columns)))
    return replace(function, columns=columns, needs_answer=function.needs_answer or "answer" in judge.names)


def _resolved(name: str, weight: float) -> RewardFunction:
    function = named_function(name, what="reward function", example="gtpo_megatron.rewards.math_answer:math_answer")
    statement = _stated(function)
    form, columns, accepts = _bound(function, name)
    return RewardFunction(
        name=name,
        function=function,
        form=form,
        is_async=inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__),
        weight=weight,
        columns=tuple(dict.fromkeys((*columns, *statement.columns))),
        accepts=accepts,
        needs_answer=form is Form.ANSWER,
        statement=statement,
    )


def _stated(function: Any) -> Statement:
    """Returns the statement of a function about itself; for a ``partial``, that of the function in it."""
    for one in (function, getattr(function, "func", None), type(function).__call__):
        if isinstance(found := getattr(one, _STATEMENT, None), Statement):
            return found
    return Statement()


def _bound(function: Callable[..., Any], name: str) -> tuple[Form, tuple[str, ...], frozenset[str] | None]:
    """The form of a function, the columns that its signature needs, and the names that it takes."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of some functions written in C nothing is known
        return Form.ANSWER, (), None
    parameters = signature.parameters
    yields_one = inspect.isgeneratorfunction(function) and "completions" not in parameters
    if yields_one or inspect.isasyncgenfunction(function):
        raise ConfigError(f"reward function {name!r}: it yields; expected one that returns its reward")
    if "completions" in parameters:
        named = [one for one in parameters.values() if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
        positional = [one.name for one in parameters.values() if one.kind is one.POSITIONAL_ONLY]
        if positional:
            raise ConfigError(
                f"reward function {name!r}: {positional[0]} is positional only; columns are passed by their names"
            )
        needed = tuple(one.name for one in named if one.default is one.empty and one.name not in _GIVEN)
        takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        return Form.COLUMNS, needed, None if takes_any else frozenset(one.name for one in named)
    if _fits(signature, 1) and (not _fits(signature, 2) or _is_request(function, next(iter(parameters.values())))):
        _check_request(function, name, signature)
        return Form.REQUEST, (), None
    if _fits(signature, 2):
        _check_answer(name, signature)
        return Form.ANSWER, (), None
    raise ConfigError(f"reward function {name!r}: takes {printable(signature)}; expected {EXPECTED}")


def _fits(signature: inspect.Signature, count: int) -> bool:
    """Whether it can be called with so many positional arguments."""
    with contextlib.suppress(TypeError):
        signature.bind(*range(count))
        return True
    return False


def _is_request(function: Callable[..., Any], parameter: inspect.Parameter) -> bool:
    """Whether the first of several parameters is the request, by its name or annotation."""
    if parameter.kind is parameter.VAR_POSITIONAL:
        return False
    return parameter.name == "request" or _annotation(function, parameter) is RewardRequest


def _annotation(function: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    hint = parameter.annotation
    with contextlib.suppress(Exception):  # an annotation in quotes is the user's code
        hint = inspect.signature(function, eval_str=True).parameters[parameter.name].annotation
    return {"str": str, "RewardRequest": RewardRequest}.get(hint, hint) if isinstance(hint, str) else hint


def _check_request(function: Callable[..., Any], name: str, signature: inspect.Signature) -> None:
    """Refuses a function of the form ``REQUEST`` whose parameter is meant to be a text, such as the response alone."""
    parameter = next(iter(signature.parameters.values()))
    hint = _annotation(function, parameter)
    if hint is str or (hint is not RewardRequest and parameter.name in _RESPONSE | _PROMPT | _ANSWER):
        raise ConfigError(
            f"reward function {name!r}: takes {printable(signature)}, and {parameter.name!r} would get a "
            f"RewardRequest; expected {EXPECTED}: take (request) and read request.response, or (response, answer)"
        )


def _check_answer(name: str, signature: inspect.Signature) -> None:
    """Refuses a function of the form ``ANSWER`` whose names say another order, or an option in the answer's place."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [one for one in signature.parameters.values() if one.kind in kinds]
    wrong = [(one, "the response") for one in positional[:1] if one.name in _PROMPT | _ANSWER]
    for one in positional[1:2]:
        is_option = isinstance(one.default, bool) and one.name not in _ANSWER
        if is_option or one.name in _PROMPT | _RESPONSE:
            wrong.append((one, "the reference answer"))
    if wrong:
        parameter, given = wrong[0]
        raise ConfigError(
            f"reward function {name!r}: takes {printable(signature)}, and {parameter.name!r} would get {given}; "
            f"expected {EXPECTED}: take (response, answer) in this order, or (request), which has the prompt too"
        )


def check_threshold(functions: Sequence[RewardFunction], threshold: float, *, option: str) -> None:
    """Raises ConfigError if a function that is alone states another threshold, times its weight, than is configured.

    In a sum it depends on the other terms, so that a lower one is only a warning: with it, responses that the function
    calls wrong can be correct.

    Args:
        functions: the run's rewards.
        threshold: the configured one.
        option: the command-line option that sets it.
    """
    for one in functions:
        if one.statement.success_threshold is None:
            continue
        stated = one.weight * one.statement.success_threshold
        weighed = f", {stated:g} by its weight" if one.weight != 1 else ""
        said = (
            f"reward function {one.name!r} calls a response correct from a reward of "
            f"{one.statement.success_threshold:g} on{weighed}, and the configuration from {threshold:g} on: set "
            f"{option}"
        )
        if len(functions) == 1 and not math.isclose(threshold, stated):
            raise ConfigError(f"{said} {stated:g}")
        if len(functions) > 1 and threshold < stated:
            logger.warning("%s above what the other terms can give a wrong response", said)


def takes_several(functions: Sequence[RewardFunction]) -> bool:
    """Whether one call may have several rows: a function is batched, or async."""
    return any(one.is_async or one.form is Form.COLUMNS for one in functions)


def needs_answer(functions: Sequence[RewardFunction]) -> bool:
    """Whether every row must have a reference answer."""
    return any(one.needs_answer for one in functions)


def complaint(functions: Sequence[RewardFunction], columns_json: str) -> str:
    """Why these functions cannot grade a row with these columns; "" if they can."""
    for one in functions:
        if not one.columns and one.statement.complaint is None:
            continue
        columns = RewardRequest(response="", columns_json=columns_json).columns
        missing = [name for name in one.columns if columns.get(name) is None]
        if missing:
            found = printable(", ".join(columns)) or "none"
            return f"reward function {one.name!r} needs the column {missing[0]!r}; the row has {found}"
        if one.statement.complaint is not None and (reason := one.statement.complaint(columns)):
            return reason
    return ""


def answer_complaint(functions: Sequence[RewardFunction], answer: str) -> str:
    """Why no response could earn a reference answer; "" if one could."""
    asked = (one.statement.answer_complaint for one in functions)
    return next((reason for ask in asked if ask is not None and (reason := ask(answer))), "")


def resolve_final_answer(text: str) -> Callable[[str], str | None] | None:
    """The function ``final_answer`` in the module of the first reward function.

    It takes a response and returns its answer or None, for maj@k. None if the module has no such function.

    Raises:
        ConfigError: as :func:`resolve_rewards`.
    """
    first = resolve_rewards(text)[0]
    found = getattr(named_module(first.name, what="reward function"), "final_answer", None)
    return cast("Callable[[str], str | None]", found) if callable(found) else None
