"""Reward functions of every form; the pool's workers import them by name."""

import asyncio
import os
import time
from pathlib import Path

from gtpo_megatron.rewards.function import states
from gtpo_megatron.rewards.request import Reward, RewardRequest

AT_ONCE = 0
MOST_AT_ONCE = 0


def seen(request):
    return Reward(
        len(request.columns["tests"]),
        parts={"format": 0.5, "tokens": request.num_response_tokens},
        info={"prompt": request.prompt_text, "ended": request.ended, "messages": len(request.messages)},
    )


def by_annotation(one: RewardRequest, strict: bool = False) -> float:
    return float(one.response)


def batched(completions, scale, **columns):
    """As in TRL: the text of a completion is in its message if the prompt is a chat."""
    texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
    if "die" in texts:
        os._exit(3)
    if "hang" in texts:
        time.sleep(60)
    if "raise" in texts:
        raise ValueError("no")
    assert len(columns["prompts"]) == len(texts)
    return [float(text) * (factor or 1) for text, factor in zip(texts, scale, strict=True)]


def rows_in_call(completions, **columns):
    """How many rows were given together, once the files exist that they wait for."""
    for path in (one.removeprefix("wait-for ") for one in completions if one.startswith("wait-for ")):
        while not Path(path).exists():
            time.sleep(0.01)
    return [float(len(completions))] * len(completions)


def too_few(completions, **columns):
    return [1.0]


def nothing(completions, **columns):
    return None


def no_answer(completions, prompts):
    return [None if one == "none" else 1.0 for one in completions]


async def counted(request):
    """How many rows were graded at the same time, so far."""
    global AT_ONCE, MOST_AT_ONCE
    AT_ONCE += 1
    MOST_AT_ONCE = max(AT_ONCE, MOST_AT_ONCE)
    await asyncio.sleep(60.0 if request.response == "hang" else 0.05)
    AT_ONCE -= 1
    if request.response == "raise":
        raise ValueError("no")
    return float(MOST_AT_ONCE)


async def batched_later(completions, **columns):
    await asyncio.sleep(0.01)
    return [float(one) for one in completions]


class Callable:
    async def __call__(self, request):
        return 2.0


an_object = Callable()


def length(response, answer):
    return float(len(response))


def bad_part(request):
    return Reward(1.0, parts={"No Name": 1.0})


def three(a, b, c):
    return 1.0


def positional(completions, /, **columns):
    return []


@states(success_threshold=1.0, columns=("tests",), complaint=lambda columns: "" if columns["tests"] else "no tests")
def stated(request):
    return 1.0
