"""Deals responses to data-parallel ranks so that each has about as many tokens."""

from collections.abc import Sequence


def shard_contiguous(lengths: Sequence[int], num_ranks: int) -> list[tuple[int, ...]]:
    """Rows of each rank: neighbours stay together, cut where the tokens so far pass each rank's equal share.

    Rows ordered by group are split in at most ``num_ranks - 1`` groups, so hardly any sum has to travel. Deterministic.
    No rank gets more than the mean plus the longest response.

    Args:
        lengths: tokens of each row.
        num_ranks: how many ranks share them; some get none where rows are few.
    """
    total, so_far = sum(lengths), 0
    rows: list[list[int]] = [[] for _ in range(num_ranks)]
    for row, length in enumerate(lengths):
        middle = 2 * so_far + length  # twice the position of the row's middle token
        rows[min(middle * num_ranks // (2 * total), num_ranks - 1) if total else 0].append(row)
        so_far += length
    return [tuple(chosen) for chosen in rows]
