"""The tokens that each entropy is compared with, and their number: the axes of [S sec. 5].

A token is compared within its *set*: O+ or O- of its group (or of the batch). The key of a token identifies its
comparison: the set and ``t`` (axis ``position``, the formulas of the paper), the response (``response``) or the set
(``matrix``).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gtpo_megatron.algorithms.batch.reduction import KeyReduction, LocalReduction, Reduction, SharedRange, SplitKeys
from gtpo_megatron.algorithms.batch.response_table import ResponseTable
from gtpo_megatron.algorithms.batch.tokens import Tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The comparisons that this rank's tokens take part in.

    Attributes:
        key: ``[N]`` integers in [0, K).
        count: ``[K]`` int64, tokens of each comparison over all ranks; ``d_t`` for O+ and ``h_t`` for O- on the axis
            ``position``.
        reduction: the ranks that hold tokens of them.
    """

    key: Tensor
    count: Tensor
    reduction: KeyReduction


@dataclass(frozen=True, kw_only=True, slots=True)
class _HeldSets:
    """The ``S`` sets of which this rank holds tokens.

    Attributes:
        slot: ``[R]`` int64, the set of each response; -1: none of these sets.
        longest: ``[S, ranks]`` int64, number of tokens of each rank's longest response.
        shared: ``[S]`` int64, number of keys at which several ranks hold tokens: the second largest of ``longest``.
        width: ``[S]`` int64, number of keys of each set on this rank.
        first: ``[S]`` int64, the first key of each set.
    """

    slot: Tensor
    longest: Tensor
    shared: Tensor
    width: Tensor
    first: Tensor


def compare(
    tokens: Tokens,
    table: ResponseTable,
    axis: Literal["position", "response", "matrix"],
    *,
    spans_batch: bool,
    compared: Tensor | None,
    reduction: Reduction,
) -> Comparison:
    """Computes keys and counts of this rank's tokens.

    Args:
        tokens: this rank's tokens.
        table: the responses of the batch.
        axis: see above.
        spans_batch: the sets span the batch instead of the group.
        compared: ``[N]`` bool, tokens that take part; None: all. With a mask the counts are reduced over ranks; without
            one they follow from the lengths.
        reduction: the ranks.
    """
    device = tokens.row.device
    if axis == "response":
        count = tokens.counts(compared)
        return Comparison(key=tokens.row, count=count, reduction=LocalReduction())
    held = _held_sets(table, axis, spans_batch=spans_batch)
    first = held.first[held.slot[table.mine]] if len(held.first) else table.mine  # any number if there are no tokens
    key = tokens.numbered_from(first) if axis == "position" else tokens.spread(first)
    split = _split_keys(held, reduction, device)
    if compared is not None:
        count = torch.zeros(int(held.width.sum()), dtype=torch.int64, device=device)
        count = split.sum(count.scatter_add_(0, key, compared.to(torch.int64)))
    elif axis == "matrix":
        inside = held.slot >= 0
        count = torch.zeros_like(held.width).index_add_(0, held.slot[inside], table.lengths[inside]).to(device)
    else:
        count = _live_counts(table.lengths, held).to(device)
    return Comparison(key=key, count=count, reduction=split)


def _held_sets(table: ResponseTable, axis: str, *, spans_batch: bool) -> _HeldSets:
    sets = torch.where(table.is_live, table.sets(spans_batch=spans_batch), -1)
    own = sets[table.mine]
    ids = torch.unique(own[own >= 0])
    found = torch.searchsorted(ids, sets).clamp(max=max(len(ids) - 1, 0))
    slot = torch.where(ids[found] == sets, found, -1) if len(ids) else torch.full_like(sets, -1)
    inside = slot >= 0
    num_ranks = max(int(table.owners.max()) if len(table.owners) else 0, table.rank) + 1
    cell = slot[inside] * num_ranks + table.owners[inside]
    longest = torch.zeros(len(ids) * num_ranks, dtype=torch.int64)
    longest = longest.scatter_reduce_(0, cell, table.lengths[inside], "amax").view(-1, num_ranks)
    shared = longest.topk(2, dim=1).values[:, 1] if num_ranks > 1 else torch.zeros_like(ids)
    width = torch.maximum(longest[:, table.rank], shared)
    if axis == "matrix":
        shared, width = shared.clamp(max=1), width.clamp(max=1)
    return _HeldSets(slot=slot, longest=longest, shared=shared, width=width, first=torch.cumsum(width, 0) - width)


def _live_counts(lengths: Tensor, held: _HeldSets) -> Tensor:
    """``d_t`` and ``h_t``: the number of responses of each set with more than ``t`` tokens, ``[K]`` int64."""
    inside = held.slot >= 0
    slot = held.slot[inside]
    last = held.first[slot] + torch.minimum(lengths[inside], held.width[slot]) - 1
    ends = torch.bincount(last, minlength=int(held.width.sum()))
    from_here_on = ends.flip(0).cumsum(0).flip(0)  # in this set and in all later ones
    behind = torch.cat((from_here_on, from_here_on.new_zeros(1)))[held.first + held.width]
    return from_here_on - torch.repeat_interleave(behind, held.width)


def _split_keys(held: _HeldSets, reduction: Reduction, device: torch.device) -> KeyReduction:
    """The keys at which several ranks hold tokens, with those ranks.

    Sets with the same ranks are adjacent, in the same order on all of these ranks.
    """
    together: dict[tuple[int, ...], list[Tensor]] = {}
    holders: list[list[int]] = [[] for _ in held.first]
    for slot, rank in torch.nonzero(held.longest).tolist():
        holders[slot].append(rank)
    for members, start, size in zip(holders, held.first.tolist(), held.shared.tolist(), strict=True):
        if size:
            together.setdefault(tuple(members), []).append(torch.arange(start, start + size))
    parts = {members: torch.cat(together[members]) for members in sorted(together)}
    index = torch.cat([torch.zeros(0, dtype=torch.int64), *parts.values()])
    ranges = [SharedRange(members=members, size=len(part)) for members, part in parts.items()]
    return SplitKeys(index=index.to(device), ranges=ranges, reduction=reduction)
