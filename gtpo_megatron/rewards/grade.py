"""Calls reward functions of any form on some rows, and checks what they return."""

import asyncio
import contextlib
import inspect
import json
import math
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Sized
from collections.abc import Set as AnySet
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, Literal, SupportsFloat

from gtpo_megatron.config.reward import RewardConfig
from gtpo_megatron.errors import DataError
from gtpo_megatron.judge.client import Judge, JudgeClient
from gtpo_megatron.rewards.function import Form, RewardFunction, resolve_rewards
from gtpo_megatron.rewards.request import OUT_OF_MEMORY, Reward, RewardRequest, Verdict
from gtpo_megatron.sandbox.choose import open_sandbox
from gtpo_megatron.untrusted.raised import text_of
from gtpo_megatron.untrusted.text import printable, shown

LARGEST_REWARD = 1e6
"""Largest magnitude of a reward; beyond it, differences and squares in float32 lose precision."""

INFO_CHARACTERS = 4_000
"""Length to which the JSON of a reward's info is cut; it goes to the driver for every response."""

REASON_CHARACTERS = 500
"""Length to which an exception's text, made one line, is cut; some contain the whole response."""

_PART = re.compile(r"[a-z][a-z0-9_]{0,63}")


class RewardCaller:
    """Calls the weighted functions of a run, in the process that grades.

    Args:
        config: functions and limits; a function that is not async must be interrupted from outside.
        store: path of the database of the judge's answers; "": nothing is shared with other processes.

    Attributes:
        functions: the functions, at least one.

    Raises:
        ConfigError: a function cannot be imported, or has another signature.
    """

    def __init__(self, config: RewardConfig, *, store: str = "") -> None:
        self.functions = resolve_rewards(config.function)
        self._sandbox = open_sandbox(config.sandbox, config.packages)
        self._judge = JudgeClient(config.judge, store)
        self._timeout_s = config.timeout_s
        self._runner = asyncio.Runner()  # one event loop for all calls, so that a function may keep connections

    def grade(self, requests: Sequence[RewardRequest]) -> list[Verdict]:
        """Grades rows; one verdict per row, whatever the functions do."""
        columns = [
            self._called(function, [self._given(function, row) for row in requests]) for function in self.functions
        ]
        if len(columns) == 1 and self.functions[0].weight == 1.0:
            return columns[0]
        return [_summed(self.functions, verdicts) for verdicts in zip(*columns, strict=True)]

    def limit_s(self, requests: Sequence[RewardRequest]) -> float:
        """Seconds that a call with these rows may take: the limit of a row, or what a function says that one needs."""
        return max(self._limit_of(function, row) for function in self.functions for row in requests)

    def close(self) -> None:
        """Ends the event loop, the sandbox and the judge's connection."""
        self._runner.run(self._judge.close())
        self._runner.close()
        self._sandbox.close()

    def _limit_of(self, function: RewardFunction, request: RewardRequest) -> float:
        stated = function.statement.limit_s
        if stated is None:
            return self._timeout_s
        try:
            return max(self._timeout_s, stated(replace(request, limit_s=self._timeout_s)))
        except Exception:  # noqa: BLE001 - the row cannot be read, which grading it says
            return self._timeout_s

    def _given(self, function: RewardFunction, request: RewardRequest) -> RewardRequest:
        """Makes the request that one function gets: it shares nothing with another function or another response."""
        judge = Judge(self._judge, budget=request.judge_budget)
        return request.fresh(limit_s=self._limit_of(function, request), sandbox=self._sandbox, judge=judge)

    def _called(self, function: RewardFunction, requests: Sequence[RewardRequest]) -> list[Verdict]:
        if function.form is Form.COLUMNS:
            return self._called_on_columns(function, requests)
        if function.is_async:
            return self._runner.run(self._awaited(function, requests))
        return [_verdict(partial(self._called_on_one, function, row)) for row in requests]

    def _called_on_one(self, function: RewardFunction, request: RewardRequest) -> Reward:
        return checked(self._final(function.function(*_of_one(function, request))))

    def _final(self, returned: Any) -> Any:
        """Returns the result itself; an awaitable, as of a wrapped async function, is awaited."""
        return self._runner.run(self._limited(returned)) if inspect.isawaitable(returned) else returned

    def _called_on_columns(self, function: RewardFunction, requests: Sequence[RewardRequest]) -> list[Verdict]:
        returned: list[Any] = []

        def call() -> Reward:
            found = self._final(function.function(**function.arguments(requests)))
            returned.extend(_as_many(found, len(requests)))
            return Reward(0.0)

        failed = _verdict(call, kind="call")
        if failed.kind != "ok":
            return [failed] * len(requests)
        return [_verdict(partial(checked, value)) for value in returned]

    async def _limited(self, awaitable: Awaitable[Any]) -> Any:
        task = asyncio.ensure_future(awaitable)
        try:
            end = time.monotonic() + self._timeout_s
            while not task.done() and (left := end - time.monotonic()) > 0:
                await asyncio.wait({task}, timeout=left)
            is_late = task.cancel()
            await asyncio.wait({task})
        finally:
            task.cancel()
        if is_late and task.cancelled():
            raise _LateError(f"took longer than {self._timeout_s:g} s")
        return task.result()

    async def _awaited(self, function: RewardFunction, requests: Sequence[RewardRequest]) -> list[Verdict]:
        """All rows at the same time, each with its own limit."""
        results = await asyncio.gather(
            *(self._limited(function.function(*_of_one(function, row))) for row in requests), return_exceptions=True
        )
        return [_verdict(partial(_checked_result, result)) for result in results]


class _LateError(Exception):
    """A row took too long; its text is the whole reason."""


def checked(returned: object, *, by: str = "the reward function") -> Reward:
    """Returns a function's result for one row as a reward of finite numbers.

    A number of numpy or torch is allowed.

    Args:
        returned: the result.
        by: words for what has returned it, in errors.

    Raises:
        DataError: it returned something else, or a number of more than ``LARGEST_REWARD`` in magnitude.
    """
    if not isinstance(returned, Reward):
        return Reward(_number(returned, f"{by} returned"))
    value = _number(returned.value, f"{by} returned a Reward of value")
    named: Any = returned.parts  # the user's, whatever the annotation says
    info: Any = returned.info
    if not isinstance(named, Mapping) or not isinstance(info, Mapping):
        raise DataError(f"{by} returned {shown(returned)}; expected mappings as parts and info")
    parts: dict[str, float] = {}
    for name, part in named.items():
        if not isinstance(name, str) or not _PART.fullmatch(name):
            raise DataError(f"{by} named a part {shown(name)}; expected lower case letters, digits, _")
        parts[name] = _number(part, f"{by} returned in the part {name!r}")
    return Reward(value, parts, info)


def _number(returned: object, what: str) -> float:
    reward = math.nan
    value: Any = returned
    with contextlib.suppress(TypeError, ValueError, OverflowError, RuntimeError):  # several numbers, or too large
        if isinstance(value, SupportsFloat) and hasattr(value, "item"):
            value = value.item()  # of numpy and torch; float() of an array, or of a tensor with a gradient, warns
        if isinstance(value, SupportsFloat) and not isinstance(value, str):
            reward = float(value)
    if not math.isfinite(reward):
        raise DataError(f"{what} {shown(returned)}; expected a finite number")
    if abs(reward) > LARGEST_REWARD:
        raise DataError(
            f"{what} {shown(returned)}; expected a number between -{LARGEST_REWARD:g} and {LARGEST_REWARD:g}: scale it "
            f"down"
        )
    return reward


def _of_one(function: RewardFunction, request: RewardRequest) -> tuple[Any, ...]:
    return (request,) if function.form is Form.REQUEST else (request.response, request.answer)


def _as_many(returned: Any, num: int) -> list[Any]:
    """Returns a batched function's result as a list of one value per row, by position and never by a label.

    Raises:
        DataError: it has no order (a dict, a set), no values, another number of them, or several per row.
    """
    what = f"the reward function returned {_described(returned)}"
    has_no_order = isinstance(returned, str | bytes | bytearray | Mapping | AnySet)
    if has_no_order or not isinstance(returned, Iterable) or getattr(returned, "ndim", 1) != 1:
        raise DataError(f"{what}; expected a list of {num} rewards, in the order of the completions")
    values = list(islice(returned, num + 1))  # a generator may have no end
    if len(values) != num:
        found = f"more than {num}" if values[num:] else len(values)
        if isinstance(returned, Sized):
            found = len(returned)
        raise DataError(f"the reward function returned {found} values for {num} completions; expected one each")
    return values


def _described(returned: Any) -> str:
    """A value for an error: of arrays and tables the kind and shape."""
    shape = getattr(returned, "shape", None)
    if isinstance(shape, tuple) and isinstance(returned, Iterable):
        return f"{_kind(returned)} of shape {tuple(shape)}"
    return shown(returned) if returned is None or isinstance(returned, int | float | str) else _kind(returned)


def _kind(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def _checked_result(result: object) -> Reward:
    if isinstance(result, BaseException):
        raise result
    return checked(result)


def _verdict(call: Callable[[], Reward], *, kind: Literal["error", "call"] = "error") -> Verdict:
    try:
        reward = call()
        info = json.dumps(dict(reward.info), default=str) if reward.info else ""
    except MemoryError:
        return Verdict("memory", failure=OUT_OF_MEMORY)
    except _LateError as error:
        return Verdict(kind, failure=str(error))
    except Exception as error:  # noqa: BLE001 - any failure of the user's function fails these rows only
        return Verdict(kind, failure=f"{type(error).__name__}: {_shortened(printable(text_of(error)))}")
    if len(info) > INFO_CHARACTERS:
        info = json.dumps({"cut": info[:INFO_CHARACTERS]})
    return Verdict("ok", reward.value, dict(reward.parts), info)


def _summed(functions: Sequence[RewardFunction], verdicts: Sequence[Verdict]) -> Verdict:
    """The weighted sum of the rewards of one row; each function's own becomes a part."""
    value = 0.0
    parts: dict[str, float] = {}
    infos: dict[str, Any] = {}
    for function, verdict in zip(functions, verdicts, strict=True):
        if verdict.kind != "ok":
            return Verdict(verdict.kind, failure=f"{function.name}: {verdict.failure}")
        value += function.weight * verdict.reward
        label = function.label
        parts |= {label: verdict.reward} | {f"{label}_{name}": part for name, part in verdict.parts.items()}
        if verdict.info:
            infos[label] = json.loads(verdict.info)
    return Verdict("ok", value, parts, json.dumps(infos) if infos else "")


def _shortened(text: str) -> str:
    return text if len(text) <= REASON_CHARACTERS else f"{text[:REASON_CHARACTERS]}..."
