"""Choosing a fraction of the tokens of a batch, exactly, when the batch is spread over ranks.

The k-th largest value is found by counting: scores become integers in the same order, and three all-reduced histograms
of 2,048 bins, each of the next 11 bits, narrow the threshold to one value. Counts are exact, so any sharding gives the
same choice, and what travels does not depend on the number of tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gtpo_megatron.algorithms.batch.reduction import KeyReduction
from gtpo_megatron.algorithms.batch.tokens import Tokens

_BITS = 11
_ROUNDS = 3
"""33 bits cover the 32 of a float32 and the 32 upper ones kept of a hash."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectionBatch:
    """This rank's ``N`` tokens, of which an algorithm selects some.

    Attributes:
        tokens: where they are.
        entropy: ``[N]`` float64, nats.
        old_logprobs: ``[N]`` float64, nats.
        advantages: ``[N]`` float64.
        num_tokens: of all ranks.
        reduction: the ranks.
    """

    tokens: Tokens
    entropy: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    num_tokens: int
    reduction: KeyReduction

    def part(self, fraction: float) -> int:
        """``fraction`` of all tokens, rounded down but not to none; 0 only if the fraction is 0."""
        return max(1, int(fraction * self.num_tokens)) if fraction > 0 else 0


def ordered_integers(values: Tensor) -> Tensor:
    """float64, taken as float32 -> int64 in [0, 2**32), in the same order; -0 counts as 0."""
    bits = (values.to(torch.float32) + 0.0).contiguous().view(torch.int32).to(torch.int64)
    return torch.where(bits >= 0, bits + (1 << 31), -1 - (bits + (1 << 31)) + (1 << 31))


def largest(keys: Tensor, candidates: Tensor, count: int, reduction: KeyReduction) -> Tensor:
    """Marks the ``count`` candidates with the largest keys over all ranks; ties with the last one are marked too.

    Args:
        keys: ``[N]`` int64 in [0, 2**33).
        candidates: ``[N]`` bool.
        count: how many over all ranks; at least 0.
        reduction: three ``sum`` over ranks, 2,048 int64 each, always three.

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
