"""Splits the prompt groups of a step over its optimizer updates."""

import random
from collections.abc import Sequence


def mini_batch_groups(
    prompt_groups: Sequence[int], *, mini_batch_prompts: int, num_updates: int, seed: int, step: int
) -> list[tuple[int, ...]]:
    """The prompt groups of each update of a step: consecutive slices of a seeded order, starting over at its end.

    The result is the same on every rank.

    Args:
        prompt_groups: the groups of the whole rollout batch.
        mini_batch_prompts: groups per update; 0 means all.
        num_updates: updates of the step.
        seed: seed of the run.
        step: number of the step; each step has its own order.
    """
    size = min(mini_batch_prompts, len(prompt_groups)) or len(prompt_groups)
    if size == len(prompt_groups):
        return [tuple(prompt_groups)] * num_updates
    order = list(prompt_groups)
    random.Random(f"mini-batches/{seed}/{step}").shuffle(order)
    starts = [update * size for update in range(num_updates)]
    return [tuple(order[(start + i) % len(order)] for i in range(size)) for start in starts]
