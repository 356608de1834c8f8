"""How weights are compared, and the grids on which they are summed: facts about the batch that all ranks share."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gtpo_megatron.algorithms.fixed_point import INTEGER_BITS, grid_scale
from gtpo_megatron.algorithms.portable_math import LARGEST_LOG
from gtpo_megatron.algorithms.segments import SegmentPlan
from gtpo_megatron.algorithms.table import ResponseTable
from gtpo_megatron.errors import DataError

LEAST_WEIGHT = 2.0**-950
"""Weights lie between this and its inverse, so that no inverse, sum or grid of float64 overflows."""

WIDEST_RATIO = 2.0**100
"""Largest over smallest weight for geometric means: their shares are bounded by it, and must fit float32."""

LEAST_BITS = 25
"""Bits that the smallest weight must keep on a grid that serves all positions of a segment."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShareRule:
    """How weights are compared.

    Attributes:
        axis: ``position``, ``response`` or ``matrix``.
        is_geometric: compare with the geometric mean.
        spans_batch: compare over the batch instead of the group.
        floor: added to every weight.
        clip: weights are clamped to it first.
        inverts: somebody looks at the shares of wrong responses, which need inverses.
        may_be_narrow: shares may have to be told apart that are all close to 1: both ends of their range are found, and
            their deviations from 1 are summed instead of themselves.
    """

    axis: Literal["position", "response", "matrix"] = "position"
    is_geometric: bool = False
    spans_batch: bool = False
    floor: float = 1e-8
    clip: tuple[float, float] | None = None
    inverts: bool = True
    may_be_narrow: bool = True

    @property
    def bounds(self) -> tuple[float, float]:
        """Interval that weights are clamped to; slightly negative ones become 0."""
        return self.clip or (0.0, torch.finfo(torch.float64).max)

    @property
    def smallest(self) -> float:
        """What no weight can be below."""
        return self.bounds[0] + self.floor

    @property
    def raised_by(self) -> float:
        """What is really added: the floor, or so little that only a column of zeros sees it, and becomes uniform."""
        return max(self.floor, LEAST_WEIGHT)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenWeights:
    """What this rank's tokens are weighed by.

    Attributes:
        values: ``[B, T]`` float32 or float64: entropies, or what stands in their place; nats; no gradient flows.
        response_mask: ``[B, T]`` bool, left-aligned.
        shaping_mask: ``[B, T]`` bool; tokens where it is False have share 1 and enter no sum and no count. None: all.
        padding_is_harmless: ``values`` outside the mask can be multiplied by 0; otherwise they are cleared first.
        has_negatives: some values are below 0 by rounding, and are taken as 0.
        name: the tensor that the user knows, for messages.
    """

    values: Tensor
    response_mask: Tensor
    shaping_mask: Tensor | None = None
    padding_is_harmless: bool = False
    has_negatives: bool = True
    name: str = "token_entropy"


def check_weights(table: ResponseTable, rule: ShareRule, name: str) -> None:
    """Weights that are inverted, or whose log is taken, are positive, and all lie in the range of the grids.

    Args:
        table: of the batch; ``lowest`` may be 0 throughout where floor and clip bound weights well enough.
        rule: floor and clip count.
        name: of the weights, for messages.

    Raises:
        DataError: one does not; all ranks raise it, since the table is the same on all.
    """
    low, high = rule.bounds
    smallest = table.lowest.clamp(low, high) + rule.floor
    inverted = table.is_live & ~table.is_correct if rule.inverts else torch.zeros_like(table.is_live)
    needs_inverse = table.is_live if rule.is_geometric else inverted
    too_small = needs_inverse & (smallest < LEAST_WEIGHT)
    largest = table.highest.clamp(low, high) + rule.floor
    too_large = table.is_live & (largest > 1 / LEAST_WEIGHT)
    if rule.is_geometric and bool(table.is_live.any()):
        too_large |= table.is_live & (largest > float(smallest[table.is_live].min()) * WIDEST_RATIO)
    for bad, values, words in (
        (too_small, table.lowest, "its inverse or logarithm does not exist; set entropy_floor above 0"),
        (
            too_large,
            table.highest,
            "too large beside the smallest; set entropy_clip or raise entropy_floor",
        ),
    ):
        if bool(bad.any()):
            row = int(torch.nonzero(bad)[0])
            value = float(values[row])
            raise DataError(
                f"{name} of response {row} of the batch contains {value if value else 0.0} with "
                f"entropy_floor={rule.floor}: {words}"
            )


def fixed_scales(table: ResponseTable, plan: SegmentPlan, rule: ShareRule) -> Tensor | None:
    """Powers of two that put weights (their logs, for geometric means) on a grid known before any is looked at.

    Logs have a small range, so one always exists for them: sums of ``N`` of them are exact to ``2 ** -51`` of ``N``.
    Weights of the axis ``position`` have one a segment where the largest over the smallest, times the number of
    responses, stays below ``2 ** (61 - LEAST_BITS)``: a weight is then off by ``2 ** -(LEAST_BITS + 1)`` of itself at
    most. With the default floor and 16 responses that holds up to 42 nats. Otherwise each column takes a grid of its
    own, from its own largest weight.

    Returns:
        ``[R]`` float64, the same in all rows of a segment (rows of their own, for the axis ``response``), or None.
    """
    if not rule.is_geometric and rule.axis != "position":
        return None
    if rule.axis == "response":
        return grid_scale(LARGEST_LOG * table.lengths.to(torch.float64))
    live = plan.segment_of_row >= 0
    segment, num_segments = plan.segment_of_row.clamp(min=0), len(plan.counts)
    if not num_segments:
        return torch.ones_like(table.lowest)
    terms = plan.counts
    if rule.axis == "matrix":
        terms = torch.zeros(num_segments, dtype=torch.int64).index_add_(0, segment[live], table.lengths[live])
    if rule.is_geometric:
        return grid_scale(LARGEST_LOG * terms.to(torch.float64))[segment]
    low, high = rule.bounds
    smallest = torch.full((num_segments,), torch.inf, dtype=torch.float64)
    smallest.scatter_reduce_(0, segment[live], (table.lowest.clamp(low, high) + rule.raised_by)[live], "amin")
    largest = torch.zeros(num_segments, dtype=torch.float64)
    largest.scatter_reduce_(0, segment[live], (table.highest.clamp(low, high) + rule.raised_by)[live], "amax")
    if bool((largest / smallest * terms > 2.0 ** (INTEGER_BITS - 1 - LEAST_BITS)).any()):
        return None
    is_correct = torch.arange(num_segments) % 2 == 1
    return grid_scale(torch.where(is_correct, largest, 1.0 / smallest) * terms)[segment]
