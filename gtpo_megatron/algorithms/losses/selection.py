"""Exact selection of a fraction of the tokens of a batch that is sharded over ranks.

The k-th largest value is found by counting: scores are mapped to integers in the same order, and three all-reduced
histograms of 2,048 bins, each of the next 11 bits, narrow the threshold to one value. Counts are exact, so any sharding
selects the same tokens, and the traffic does not depend on the number of tokens.
"""

import torch
from torch import Tensor

from gtpo_megatron.algorithms.sums import Reduction
from gtpo_megatron.algorithms.token_batch import CreditBatch

_BITS = 11
_ROUNDS = 3
"""33 bits cover the 32 of a float32 and the 32 upper bits of a hash."""


def num_selected(batch: CreditBatch, fraction: float) -> int:
    """``fraction`` of the batch's tokens of all ranks, rounded down, at least 1; 0 only if the fraction is 0."""
    return max(1, int(fraction * int(batch.table.lengths.sum()))) if fraction > 0 else 0


def ordered_integers(values: Tensor) -> Tensor:
    """Rounds float64 to float32 and maps it to int64 in [0, 2**32) in the same order; -0 counts as 0."""
    bits = (values.to(torch.float32) + 0.0).contiguous().view(torch.int32).to(torch.int64)
    return torch.where(bits >= 0, bits + (1 << 31), -1 - bits)


def largest(keys: Tensor, candidates: Tensor, count: int, reduction: Reduction) -> Tensor:
    """Selects the ``count`` candidates with the largest keys over all ranks, and ties with the last one.

    Args:
        keys: ``[N]`` int64 in [0, 2**33).
        candidates: ``[N]`` bool.
        count: number to select over all ranks; at least 0.
        reduction: the ranks. Collectives: always three ``sum`` of 2,048 int64.

    Returns:
        ``[N]`` bool; all candidates if there are no more than ``count``.
    """
    flat = keys[candidates]
    threshold, wanted = 0, count
    for step in reversed(range(_ROUNDS)):
        shift = step * _BITS
        inside = flat[(flat >> (shift + _BITS)) == (threshold >> (shift + _BITS))]
        digits = (inside >> shift) & ((1 << _BITS) - 1)
        histogram = reduction.sum(torch.bincount(digits, minlength=1 << _BITS))
        from_top = histogram.flip(0).cumsum(0).flip(0)
        reached = torch.nonzero(from_top >= wanted).flatten()
        digit = int(reached[-1]) if len(reached) else 0
        wanted -= int(from_top[digit]) - int(histogram[digit])
        threshold |= digit << shift
    return candidates & (keys >= threshold) if count > 0 else torch.zeros_like(candidates)
