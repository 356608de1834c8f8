"""Splits responses: over data-parallel ranks by tokens, and over mini-batches."""

import random
from collections.abc import Sequence

from gtpo_megatron.config.run import RunConfig


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


def shard_by_updates(
    lengths: Sequence[int], group_ids: Sequence[int], updates: Sequence[Sequence[int]], num_ranks: int
) -> list[tuple[int, ...]]:
    """Rows per rank in ascending order, with about equally many tokens of every update.

    Rows of groups that the same updates use are sharded as by ``shard_contiguous``. One shard of the whole batch would
    give an update, which uses a random part of it, unequal numbers of tokens on the ranks, which wait for each other.

    Args:
        lengths: number of tokens of each row.
        group_ids: prompt group of each row.
        updates: groups of each update; without updates, or if each uses all groups, the result is
            ``shard_contiguous``'s.
        num_ranks: number of ranks.
    """
    users: dict[int, tuple[int, ...]] = {}
    for update, groups in enumerate(updates):
        for group in groups:
            users[group] = (*users.get(group, ()), update)
    parts: dict[tuple[int, ...], list[int]] = {}
    for row, group in enumerate(group_ids):
        parts.setdefault(users.get(group, ()), []).append(row)
    dealt: list[list[int]] = [[] for _ in range(num_ranks)]
    for rows in parts.values():
        for mine, chosen in zip(dealt, shard_contiguous([lengths[row] for row in rows], num_ranks), strict=True):
            mine += [rows[index] for index in chosen]
    return [tuple(sorted(rows)) for rows in dealt]


def updates_of_step(config: RunConfig, prompt_groups: Sequence[int], *, step: int) -> list[tuple[int, ...]]:
    """The prompt groups of each update of a step of a run; see ``mini_batch_groups``."""
    return mini_batch_groups(
        prompt_groups,
        mini_batch_prompts=config.update.mini_batch_prompts,
        num_updates=config.update.updates_per_rollout,
        seed=config.seed,
        step=step,
    )


def mini_batch_groups(
    prompt_groups: Sequence[int], *, mini_batch_prompts: int, num_updates: int, seed: int, step: int
) -> list[tuple[int, ...]]:
    """The prompt groups of each update of a step: consecutive slices of a seeded order, starting over at its end.

    The result is the same on every rank, and in the driver.

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
