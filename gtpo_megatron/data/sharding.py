"""Splits responses: over data-parallel ranks by tokens, and over mini-batches."""

import random
from collections.abc import Sequence


def shard_contiguous(lengths: Sequence[int], num_ranks: int) -> list[tuple[int, ...]]:
    """Contiguous rows per rank, with about equally many tokens.

    If rows are ordered by group, at most ``num_ranks - 1`` groups are split. No rank gets more tokens than the mean
    plus the longest response.

    Args:
        lengths: number of tokens of each row.
        num_ranks: number of ranks; some get no rows if rows are few.
    """
    total, so_far = sum(lengths), 0
    rows: list[list[int]] = [[] for _ in range(num_ranks)]
    for row, length in enumerate(lengths):
        middle = 2 * so_far + length  # twice the position of the row's middle token
        rows[min(middle * num_ranks // (2 * total), num_ranks - 1) if total else 0].append(row)
        so_far += length
    return [tuple(chosen) for chosen in rows]


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
