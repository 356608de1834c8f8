"""What a reward function is, how one is named, and how one is called."""

import contextlib
import importlib
import math
from collections.abc import Callable
from typing import Protocol, SupportsFloat, cast

from gtpo_megatron.config.named_function import named_function
from gtpo_megatron.errors import DataError
from gtpo_megatron.untrusted.text import shown

LARGEST_REWARD = 1e6
"""Advantages are differences and squares of rewards in float32; beyond this they lose what tells responses apart."""


class RewardFunction(Protocol):
    """A verifiable outcome reward; any function with this signature can be named in a recipe."""

    def __call__(self, response: str, answer: str) -> float:
        """Judges one response against its reference answer; raises where it has no verdict."""
        ...


def resolve_reward(name: str) -> RewardFunction:
    """Imports the reward function called ``module:function``.

    Raises:
        ConfigError: the name has another form, the module does not import, or it has no such callable.
    """
    example = "gtpo_megatron.rewards.math_answer:math_answer"
    return cast("RewardFunction", named_function(name, what="reward function", example=example))


def graded(function: RewardFunction, response: str, answer: str) -> float:
    """Calls the function and insists on one finite number; numpy's and torch's scalars are numbers too.

    Raises:
        DataError: it returned something else, or a number beyond ``LARGEST_REWARD`` either way. Whatever it raises
            itself passes through.
    """
    returned: object = function(response, answer)
    reward = math.nan
    if isinstance(returned, SupportsFloat) and not isinstance(returned, str):  # numpy's strings have __float__
        with contextlib.suppress(TypeError, ValueError, OverflowError, RuntimeError):  # several numbers, or too large
            reward = float(returned)
    if not math.isfinite(reward):
        raise DataError(f"the reward function returned {shown(returned)}; expected a finite number")
    if abs(reward) > LARGEST_REWARD:
        raise DataError(
            f"the reward function returned {shown(returned)}; expected a number between -{LARGEST_REWARD:g} and "
            f"{LARGEST_REWARD:g}: scale it down"
        )
    return reward


def resolve_final_answer(name: str) -> Callable[[str], str | None] | None:
    """The function ``final_answer`` in the module of the reward function ``module:function``.

    It takes a response and returns the answer in it, or None, so that votes can be counted (maj@k). None where the
    module has no such function.

    Raises:
        ConfigError: as :func:`resolve_reward`.
    """
    resolve_reward(name)
    found = getattr(importlib.import_module(name.partition(":")[0]), "final_answer", None)
    return cast("Callable[[str], str | None]", found) if callable(found) else None
