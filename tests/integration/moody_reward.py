"""A reward of a user's own that raises on some responses."""

from gtpo_megatron.rewards.math_answer import math_answer


def moody(response: str, answer: str) -> float:
    if len(response) % 5 == 0:
        raise RuntimeError("not today")
    return math_answer(response, answer)
