"""Which prompts an optimizer update uses."""

import random
from collections.abc import Sequence


def mini_batch_groups(
    prompt_groups: Sequence[int], *, mini_batch_prompts: int, num_updates: int, seed: int, step: int
) -> list[tuple[int, ...]]:
    """The prompt groups of each of a step's updates: consecutive slices of a seeded order, starting over at its end.

    The same on every rank, whichever responses it holds.

    Args:
        prompt_groups: of the whole rollout batch.
        mini_batch_prompts: groups an update; 0 means all.
        num_updates: of the step.
        seed: of the run.
        step: number of the step; every step has an order of its own.
    """
    size = min(mini_batch_prompts, len(prompt_groups)) or len(prompt_groups)
    if size == len(prompt_groups):
        return [tuple(prompt_groups)] * num_updates
    order = list(prompt_groups)
    random.Random(f"mini-batches/{seed}/{step}").shuffle(order)
    starts = [update * size for update in range(num_updates)]
    return [tuple(order[(start + i) % len(order)] for i in range(size)) for start in starts]
