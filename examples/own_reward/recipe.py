"""Your own reward: a function in this file, with a part that is shown as a metric of its own."""

import re
from dataclasses import replace
from pathlib import Path

from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.rewards.request import Reward
from recipes import tiny_cpu

BOXED = re.compile(r"\\boxed\{(-?\d+)\}")
FOR_FORM = 0.1
"""Reward of a wrong answer in the right form."""


def boxed_number(response: str, answer: str) -> Reward:
    """1 for the right number in a box, 0.1 for another number in a box, 0 for none.

    Args:
        response: what the model wrote.
        answer: the row's reference answer.
    """
    found = BOXED.findall(response)
    is_right = bool(found) and found[-1] == answer
    value = 1.0 if is_right else FOR_FORM if found else 0.0
    return Reward(value=value, parts={"form": float(bool(found))})


def recipe() -> RunConfig:
    """GTPO on the tiny model with this reward; a response is correct from 1 on, so form alone is not."""
    tiny = tiny_cpu.gtpo(num_steps=20)
    return replace(
        tiny,
        name="own_reward",
        reward=replace(tiny.reward, function=f"{Path(__file__).resolve()}:boxed_number"),
        algorithm=replace(tiny.algorithm, success_threshold=1.0),
    )
