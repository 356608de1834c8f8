"""Shards responses over data-parallel ranks by tokens."""

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
