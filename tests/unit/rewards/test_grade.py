"""What functions of every kind may return, alone and for several rows; and that no call sees what another changed."""

import asyncio
import collections
import functools
import json
import math
import re
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
import torch

from gtpo_megatron.config.reward import RewardConfig
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.orchestration.stages.grading import reward_batch
from gtpo_megatron.rewards.function import resolve_rewards, states
from gtpo_megatron.rewards.grade import RewardCaller
from gtpo_megatron.rewards.request import RewardRequest
from gtpo_megatron.rewards.reward_pool import RewardPool

HERE = "tests.unit.rewards.test_grade"
COLUMNS = {"tests": [1, 2, 3, 4], "deep": {"names": ["a", "b"]}}
CHAT = ({"role": "user", "content": "1+1?"},)
LENGTHS = [10.0, 20.0, 30.0]


def rows(num=4, **changes):
    return [RewardRequest(response="x" * 10 * (i + 1), columns_json=json.dumps(COLUMNS), **changes) for i in range(num)]


@pytest.fixture
def answered(monkeypatch):
    """What the caller makes of a function, under a name of this module."""

    def made(function, requests=None, *, others=""):
        monkeypatch.setitem(globals(), "under_test", function)
        caller = RewardCaller(RewardConfig(function=f"{HERE}:under_test{others}", timeout_s=5.0))
        try:
            return caller.grade(rows(3) if requests is None else requests)
        finally:
            caller.close()

    return made


def lengths(completions):
    return [float(len(one if isinstance(one, str) else one[0]["content"])) for one in completions]


INDEX = [2, 0, 1]
BATCHES = {
    "list": list,
    "tuple": tuple,
    "Series of other labels": lambda values: pd.Series(values, index=INDEX),
    "Series of words": lambda values: pd.Series(values, index=list("cab")),
    "Series with one label": lambda values: pd.Series(values, index=[0, 0, 0]),
    "Index": pd.Index,
    "array": np.array,
    "array of objects": lambda values: np.array([Fraction(one) for one in values], dtype=object),
    "strided array": lambda values: np.repeat(values, 2)[::2],
    "tensor": torch.tensor,
    "tensor with a gradient": lambda values: torch.tensor(values, requires_grad=True),
    "generator": lambda values: (one for one in values),
    "map": lambda values: map(float, values),
    "values of a dict": lambda values: dict(enumerate(values)).values(),
    "deque": collections.deque,
    "list of tensors": lambda values: [torch.tensor(one) for one in values],
}


@pytest.mark.parametrize("made", BATCHES.values(), ids=BATCHES)
def test_what_a_batched_function_returns_is_read_by_place(made, answered):
    found = answered(lambda completions: made(lengths(completions)))
    assert [reply.reward for reply in found] == LENGTHS


REFUSED = {
    "dict": (lambda values: dict(enumerate(values)), "returned a dict; expected a list of 3 rewards, in the order"),
    "Counter": (lambda values: collections.Counter(map(int, values)), "returned a Counter"),
    "set": (set, "returned a set"),
    "frozenset": (frozenset, "returned a frozenset"),
    "keys": (lambda values: dict.fromkeys(values).keys(), "returned a dict_keys"),
    "text": (lambda _: "abc", "returned 'abc'"),
    "bytes": (lambda _: b"abc", "returned a bytes"),
    "number": (lambda _: 1.0, r"returned 1\.0"),
    "None": (lambda _: None, "returned None"),
    "0-d tensor": (lambda _: torch.tensor(1.0), r"returned a Tensor of shape \(\)"),
    "column": (lambda values: np.array(values)[:, None], r"returned a ndarray of shape \(3, 1\)"),
    "table": (lambda values: pd.DataFrame({"a": values}), r"returned a DataFrame of shape \(3, 1\)"),
    "too few": (lambda values: values[:2], "returned 2 values for 3 completions"),
    "too many": (lambda values: [*values, 1.0, 1.0], "returned 5 values for 3 completions"),
    "a short Series": (lambda values: pd.Series(values[:2], index=[0, 2]), "returned 2 values"),
    "an endless generator": (lambda _: iter(lambda: 1.0, 2.0), "returned more than 3 values"),
    "a short generator": (lambda values: (one for one in values[:1]), "returned 1 values"),
}


@pytest.mark.parametrize(("made", "said"), REFUSED.values(), ids=REFUSED)
def test_a_batch_without_order_or_of_another_length_has_no_verdict_and_says_why(made, said, answered):
    found = answered(lambda completions: made(lengths(completions)))
    assert [reply.kind for reply in found] == ["call"] * 3
    assert re.search(said, found[0].failure), found[0].failure


RESULTS = {  # of one row: a reward, or None for no verdict
    "True": (True, 1.0),
    "False": (False, 0.0),
    "int": (2, 2.0),
    "numpy.float32": (np.float32(0.5), 0.5),
    "numpy.bool": (np.True_, 1.0),
    "0-d array": (np.array(0.25), 0.25),
    "array of one": (np.array([0.25]), 0.25),
    "0-d tensor": (torch.tensor(0.25), 0.25),
    "tensor with a gradient": (torch.tensor(0.25, requires_grad=True), 0.25),
    "bfloat16": (torch.tensor(0.25, dtype=torch.bfloat16), 0.25),
    "Decimal": (Decimal("0.5"), 0.5),
    "Fraction": (Fraction(1, 4), 0.25),
    "None": (None, None),
    "nan": (math.nan, None),
    "inf": (-math.inf, None),
    "Decimal nan": (Decimal("NaN"), None),
    "complex": (1j, None),
    "text": ("1.0", None),
    "numpy text": (np.str_("1.0"), None),
    "list of one": ([1.0], None),
    "array of two": (np.array([1.0, 2.0]), None),
    "empty tensor": (torch.tensor([]), None),
    "dict": ({"score": 1.0}, None),
    "too large": (10**400, None),
}


@pytest.mark.parametrize("in_batch", [False, True])
@pytest.mark.parametrize(("returned", "reward"), RESULTS.values(), ids=RESULTS)
def test_a_result_is_a_finite_number_or_no_verdict(returned, reward, in_batch, answered):
    function = (lambda completions: [returned] * len(completions)) if in_batch else (lambda _, __: returned)
    for reply in answered(function):
        assert (reply.kind, reply.reward) == (("ok", reward) if reward is not None else ("error", 0.0))
        assert reward is not None or "expected a finite number" in reply.failure


class Judge:
    def method(self, response, answer):
        return float(len(response))

    async def later(self, request):
        return float(len(request.response))

    def __call__(self, request: "RewardRequest"):
        return float(len(request.response))

    @staticmethod
    def still(response, _):
        return float(len(response))

    @classmethod
    def of_class(cls, completions):
        return lengths(completions)


def decorated(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


def plain(response, answer, scale=1.0):
    return scale * len(response)


async def later(response, answer):
    await asyncio.sleep(0)
    return float(len(response))


async def batch_later(completions, **columns):
    await asyncio.sleep(0)
    return pd.Series(lengths(completions), index=INDEX)


def yielding(completions):
    yield from lengths(completions)


def annotated(one: "RewardRequest", strict: bool = True) -> float:
    return float(len(one.response))


CALLABLES = {
    "function": plain,
    "lambda": lambda response, _: float(len(response)),
    "partial": functools.partial(plain, scale=1.0),
    "partial of the request": functools.partial(annotated, strict=False),
    "bound method": Judge().method,
    "async method": Judge().later,
    "callable object": Judge(),
    "partial of an object": functools.partial(Judge()),
    "static method": Judge.still,
    "class method": Judge.of_class,
    "decorated": decorated(plain),
    "decorated async": decorated(later),
    "decorated async batch": decorated(batch_later),
    "partial async": functools.partial(later),
    "cached": functools.lru_cache(plain),
    "async": later,
    "async batch": batch_later,
    "generator function": yielding,
    "annotated in quotes": annotated,
}


@pytest.mark.parametrize("function", CALLABLES.values(), ids=CALLABLES)
def test_a_callable_of_any_kind_is_called_in_its_form(function, answered):
    assert [reply.reward for reply in answered(function)] == LENGTHS


async def yields_later(completions):
    yield 1.0


def yields_one(response, answer):
    yield 1.0


@pytest.mark.parametrize("name", ["yields_later", "yields_one"])
def test_a_function_that_yields_one_by_one_is_refused(name):
    with pytest.raises(ConfigError, match="it yields; expected one that returns"):
        resolve_rewards(f"{HERE}:{name}")


@states(success_threshold=0.75, columns=("tests",))
def stated(response, answer, scale=1.0):
    return scale


part = functools.partial(stated, scale=2.0)


class Stated:
    @states(success_threshold=0.75, columns=("tests",))
    def __call__(self, request):
        return 1.0


an_object = Stated()


@pytest.mark.parametrize("name", ["stated", "part", "an_object"])
def test_what_a_function_states_holds_for_what_is_made_of_it(name):
    [found] = resolve_rewards(f"{HERE}:{name}")
    assert (found.statement.success_threshold, found.columns) == (0.75, ("tests",))


def quotes_the_response(request):
    raise ValueError(f"cannot parse {request.response}")


async def quotes_later(request):
    await asyncio.sleep(0)
    quotes_the_response(request)


def quotes_in_batch(completions):
    raise ValueError(f"cannot parse {completions[0]}")


@pytest.mark.parametrize("function", [quotes_the_response, quotes_later, quotes_in_batch])
def test_what_a_function_raises_is_one_line_without_control_characters(function, answered):
    forged = RewardRequest(response="\x1b[2J5\n2026-01-01 00:00:00,000 ERROR the run has ended\r\u2028\x9b31m")
    [found] = answered(function, [forged])
    assert found.failure == (
        r"ValueError: cannot parse \x1b[2J5 2026-01-01 00:00:00,000 ERROR the run has ended \x9b31m"
    )


def spoils(request):
    """Takes from everything that it is given; more would be gone if others had done so before."""
    tests, names, messages = request.columns["tests"], request.columns["deep"]["names"], request.messages
    tests.pop()
    names.clear()
    messages[0]["content"] += "!"
    assert request.columns["tests"] is tests
    return len(request.columns["tests"]) + 10.0 * len(names) + 100.0 * len(request.messages[0]["content"])


def spoils_rows(completions, prompts, tests, deep):
    """As :func:`spoils`, row by row."""
    found = []
    for prompt, some, more in zip(prompts, tests, deep, strict=True):
        some.pop()
        prompt[0]["content"] += "!"
        more["names"].append("c")
        found.append(len(some) + 10.0 * len(more["names"]) + 100.0 * len(prompt[0]["content"]))
    tests.clear()
    return found


async def spoils_later(request):
    await asyncio.sleep(0.01)
    return spoils(request)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("name", "reward"),
    [
        ("spoils", 3.0 + 500.0),
        ("spoils_later", 503.0),
        ("spoils_rows", 3.0 + 30.0 + 500.0),
        (f"spoils + {HERE}:spoils_rows", 503.0 + 533.0),
    ],
)
def test_no_call_sees_what_another_changed(name, reward, num_workers):
    """One row's responses, as of a group; twice, and for several functions."""
    config = RewardConfig(function=f"{HERE}:{name}", num_workers=num_workers, timeout_s=20.0)
    with RewardPool(config) as pool:
        for _ in range(2):
            assert reward_batch(pool.grade(rows(4, prompt=CHAT))).rewards.tolist() == [reward] * 4
    assert CHAT == ({"role": "user", "content": "1+1?"},)
