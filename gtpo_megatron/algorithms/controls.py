"""What can stand in the place of entropy, to tell what entropy itself contributes."""

from typing import Literal

import torch
from torch import Tensor

from gtpo_megatron.algorithms.hashing import mix, row_seeds, token_hashes
from gtpo_megatron.algorithms.rows import row_blocks
from gtpo_megatron.algorithms.segments import plan_segments
from gtpo_megatron.algorithms.table import ResponseTable


def stand_in(
    source: Literal["entropy", "uniform", "shuffled", "surprisal"],
    token_entropy: Tensor,
    response_mask: Tensor,
    *,
    old_logprobs: Tensor | None,
    seed: int,
) -> Tensor:
    """Weights ``[B, T]`` in nats that take the place of entropy.

    ``uniform``: 1 everywhere; ``shuffled``: each response's entropies in random order; ``surprisal``:
    ``-old_logprobs``.

    Args:
        source: which.
        token_entropy: ``[B, T]``.
        response_mask: ``[B, T]`` bool.
        old_logprobs: ``[B, T]`` nats, for ``surprisal``.
        seed: of the order; it also depends on the response's content, never on where the response was dealt to.
    """
    if source == "uniform":
        return torch.ones_like(token_entropy)
    if source == "shuffled":
        return shuffle_within_rows(token_entropy, response_mask, seed)
    if source == "surprisal" and old_logprobs is not None:
        return -old_logprobs.detach().to(token_entropy.dtype)
    return token_entropy


def shuffle_within_rows(values: Tensor, response_mask: Tensor, seed: int) -> Tensor:
    """Permutes each row's response tokens, ``[B, T]`` -> ``[B, T]``; padding stays."""
    shuffled = values.clone()
    for first, last in row_blocks(values):
        live = response_mask[first:last]
        keys = token_hashes(row_seeds(values[first:last], live, seed), values.shape[1])
        order = torch.where(live, keys, torch.iinfo(torch.int64).max).argsort(dim=1, stable=True)
        shuffled[first:last] = values[first:last].gather(1, order)
    return shuffled


def shuffle_within_segments(table: ResponseTable, values: Tensor, seed: int, *, spans_batch: bool) -> Tensor:
    """Permutes one value a response among the correct, and among the wrong, responses of each scope.

    Args:
        table: of the batch.
        values: ``[R]`` float64.
        seed: of the order; it also depends on the values, never on how responses were dealt.
        spans_batch: scopes are the whole batch instead of groups.
    """
    plan = plan_segments(table, spans_batch=spans_batch, shares_one_value=False)
    shuffled = values.clone()
    ranked = torch.argsort(table.lengths, stable=True)
    ranked = ranked[torch.argsort(values[ranked], stable=True)]
    for segment in range(len(plan.counts)):
        rows = ranked[plan.segment_of_row[ranked] == segment]
        content = values[rows].contiguous().view(torch.int64).sum()
        keys = token_hashes(mix(content + seed)[None], len(rows))[0]
        shuffled[rows] = values[rows[torch.argsort(keys, stable=True)]]
    return shuffled


def neutralise_side(weights: Tensor, is_neutral: Tensor) -> Tensor:
    """Weight 1 on every token of some rows, so that all of them have share 1.

    ``[B, T]`` float and ``[B]`` bool -> ``[B, T]``.
    """
    return torch.where(is_neutral[:, None].to(weights.device), torch.ones_like(weights), weights)
