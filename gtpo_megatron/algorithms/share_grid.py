"""The grids of exact sums of shares, and what decides them: facts about the batch that all ranks share."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gtpo_megatron.algorithms.fixed_point import grid_scale, rounding_constant
from gtpo_megatron.algorithms.portable_math import portable_log
from gtpo_megatron.algorithms.segments import SegmentPlan
from gtpo_megatron.algorithms.table import ResponseTable
from gtpo_megatron.errors import DataError

LEAST_KNOWN_FLOOR = 1e-12
"""From this on the floor alone bounds inverse weights well enough for the grid of their sums: 1e12 in 62 bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShareRule:
    """How weights are compared.

    Attributes:
        axis: ``position``, ``response`` or ``matrix``.
        is_geometric: compare with the geometric mean.
        spans_batch: compare over the batch instead of the group.
        floor: added to every weight.
        clip: weights are clamped to it first.
        finds_lowest: the smallest share of each row is wanted; otherwise 0 stands for it.
    """

    axis: Literal["position", "response", "matrix"] = "position"
    is_geometric: bool = False
    spans_batch: bool = False
    floor: float = 1e-8
    clip: tuple[float, float] | None = None
    finds_lowest: bool = True

    @property
    def bounds(self) -> tuple[float, float]:
        """Interval that weights are clamped to; slightly negative ones become 0."""
        return self.clip or (0.0, torch.finfo(torch.float64).max)

    @property
    def smallest(self) -> float:
        """What no weight can be below."""
        return self.bounds[0] + self.floor


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenWeights:
    """What this rank's tokens are weighed by.

    Attributes:
        values: ``[B, T]`` float32 or float64: entropies, or what stands in their place; nats; no gradient flows.
        response_mask: ``[B, T]`` bool, left-aligned.
        shaping_mask: ``[B, T]`` bool; tokens where it is False have share 1 and enter no sum and no count. None: all.
        padding_is_harmless: ``values`` outside the mask can be multiplied by 0; otherwise they are cleared first.
        has_negatives: some values are below 0 by rounding, and are taken as 0.
    """

    values: Tensor
    response_mask: Tensor
    shaping_mask: Tensor | None = None
    padding_is_harmless: bool = False
    has_negatives: bool = True


def check_positive(table: ResponseTable, rule: ShareRule) -> None:
    """Weights that are inverted, or whose log is taken, are positive.

    Raises:
        DataError: one is 0; all ranks raise it, since the table is the same on all.
    """
    if rule.smallest > 0:
        return
    needs_inverse = table.is_live if rule.is_geometric else table.is_live & ~table.is_correct
    is_zero = needs_inverse & (table.lowest <= 0)
    if bool(is_zero.any()):
        row = int(torch.nonzero(is_zero)[0])
        raise DataError(
            f"token_entropy of response {row} of the batch contains {float(table.lowest[row])} and entropy_floor=0: "
            "its inverse or logarithm does not exist; set entropy_floor above 0"
        )


LEAST_TOTAL_BITS = 24
"""Fraction bits that sums of squared shares must keep to be of use."""


def total_magic(
    tokens: TokenWeights, table: ResponseTable, plan: SegmentPlan, rule: ShareRule
) -> tuple[float, float] | None:
    """Rounding constants of shares and of their squares, where these have a small enough bound; else None.

    A share is at most the number of terms that it is compared with. What decides is the same on all ranks.
    """
    is_bounded = rule.axis == "position" and not rule.is_geometric
    if rule.finds_lowest or tokens.shaping_mask is not None or not is_bounded or not len(table.lengths):
        return None
    bound_bits = int(plan.counts.max()).bit_length()
    longest = int(table.lengths.max())
    square_magic, square_bits = rounding_constant(longest, 2 * bound_bits)
    return (rounding_constant(longest, bound_bits)[0], square_magic) if square_bits >= LEAST_TOTAL_BITS else None


def segment_scales(table: ResponseTable, plan: SegmentPlan, rule: ShareRule) -> Tensor:
    """``[R]`` float64: the power of two that puts each row's weights on the grid of the sums they enter."""
    low, high = rule.bounds
    smallest = table.lowest.clamp(low, high) + rule.floor
    largest = table.highest.clamp(low, high) + rule.floor
    bound = torch.where(table.is_correct, largest, 1.0 / smallest)
    if rule.is_geometric:
        bound = torch.maximum(portable_log(smallest).abs(), portable_log(largest).abs())
    if rule.axis == "response":
        return grid_scale(bound * table.lengths)
    live = plan.segment_of_row >= 0
    segment = plan.segment_of_row.clamp(min=0)
    num_segments = len(plan.counts)
    if not num_segments:
        return bound
    peak = torch.zeros(num_segments, dtype=torch.float64)
    peak.scatter_reduce_(0, segment[live], bound[live], "amax")
    terms = plan.counts
    if rule.axis == "matrix":
        terms = torch.zeros(num_segments, dtype=torch.int64).index_add_(0, segment[live], table.lengths[live])
    return grid_scale(peak * terms)[segment]
