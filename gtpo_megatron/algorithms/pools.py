"""Shaped rewards from shares, and advantages from them: ``A = (r - mean(pool)) / std(pool)`` [S 3, 14; I 5, 6].

Pools: ``joint_zero`` gives each side (correct, wrong) its own pool of all values of the scope, the other side's being
    0;
``per_set`` its own values only; ``combined`` makes one pool of both sides.

Exactness: deviations from the middle of the pool's range are rounded to a grid on which their float64 sums over a row
    are
exact; rows are summed as integers. Range, sums and counts are the same for any dealing, and so are mean and std. The
grid is at least 2 ** -30 of half the range, where the std is at least 1 / sqrt(number of values) of it.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gtpo_megatron.algorithms.fixed_point import from_limbs, rounding_constant, to_limbs
from gtpo_megatron.algorithms.reduction import Reduction
from gtpo_megatron.algorithms.rows import row_blocks
from gtpo_megatron.algorithms.shaping import PoolRule, ShapingRules, SideRule
from gtpo_megatron.algorithms.shares import Shares
from gtpo_megatron.algorithms.table import ResponseTable

ZERO_STD = 1e-12
"""A std up to this times max(1, largest magnitude) is rounding noise of a constant pool and counts as 0."""

SMALLEST_HALF = 1e-290
"""Half ranges below this have no finite inverse and count as 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Standardised:
    """Rewards and advantages of this rank's tokens, ``[B, T]`` float32, zero outside the mask."""

    shaped_rewards: Tensor
    advantages: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pools:
    """Pools of the batch on the CPU; everything but ``of_row`` is ``[P]``.

    Attributes:
        of_row: ``[B]`` int64, the pool of each local row.
        is_shared: other ranks may hold rows of the pool.
        num_own: values of the pool's side (of both, where combined).
        num_zeros: zeros that the other side puts in.
    """

    of_row: Tensor
    is_shared: Tensor
    num_own: Tensor
    num_zeros: Tensor


def standardise(
    shares: Shares,
    response_mask: Tensor,
    table: ResponseTable,
    rules: ShapingRules,
    reduction: Reduction,
    *,
    penalties: Tensor,
    is_pooled: Tensor,
) -> Standardised:
    """Shaped rewards and advantages of all tokens of this rank. ``shares.values`` is used up.

    Args:
        shares: of this rank's tokens.
        response_mask: ``[B, T]`` bool.
        table: of the batch.
        rules: sides and pools.
        reduction: one ``max`` and one ``sum`` over ranks, a few numbers a shared pool.
        penalties: ``[R]`` float64, added to the shaped rewards of each response.
        is_pooled: ``[R]`` bool; other responses enter no pool and get advantage 0.

    Returns:
        Zero advantages in pools that are constant or have at most ``ddof`` values.
    """
    mine, sides, rule = table.mine, rules.sides, rules.pool
    is_correct, penalty = table.is_correct[mine], penalties[mine]
    included = (is_pooled & table.is_live)[mine]
    pools = _plan_pools(table, rule, is_pooled & table.is_live)
    low, high = _row_ranges(shares, is_correct, sides, penalty)
    center, half, largest = _pool_ranges(pools, included, low, high, reduction)
    half = torch.where(half > SMALLEST_HALF, half, 0.0)
    inverse_half = torch.where(half > 0, 1.0 / half, 0.0)
    rows = _RowRewards(shares.values, table.lengths[mine], is_correct, sides, penalty)
    longest = int(table.lengths.max()) if len(table.lengths) else 0
    totals = _pool_sums(rows, pools, included, center, inverse_half, longest, reduction)
    mean, std = _mean_and_std(pools, totals, center, half, rule)
    is_constant = std <= ZERO_STD * largest.clamp(min=1.0)
    factor = 1.0 / (std + rule.eps) if rule.divides_by_std else torch.ones_like(std)
    factor = torch.where(is_constant | (pools.num_own + pools.num_zeros <= rule.ddof), 0.0, factor)
    return rows.apply(response_mask, mean[pools.of_row], torch.where(included, factor[pools.of_row], 0.0))


def _plan_pools(table: ResponseTable, rule: PoolRule, included: Tensor) -> _Pools:
    num_scopes = 1 if rule.spans_batch else max(1, table.num_groups)
    scope = torch.zeros_like(table.group_index) if rule.spans_batch else table.group_index
    tokens = torch.zeros(num_scopes, 2, dtype=torch.int64)
    side = table.is_correct.to(torch.int64)
    tokens.index_put_((scope[included], side[included]), table.lengths[included], accumulate=True)
    first = torch.full((num_scopes,), -1, dtype=torch.int64).scatter_reduce_(0, scope, table.owners, "amax")
    last = torch.full((num_scopes,), len(scope), dtype=torch.int64).scatter_reduce_(0, scope, table.owners, "amin")
    is_shared = first != last
    if rule.kind == "combined":
        num_own, num_zeros = tokens.sum(1), torch.zeros(num_scopes, dtype=torch.int64)
        pool = scope
    else:
        num_own, is_shared = tokens.flatten(), is_shared.repeat_interleave(2)
        num_zeros = tokens.flip(1).flatten() if rule.kind == "joint_zero" else torch.zeros_like(num_own)
        pool = 2 * scope + side
    return _Pools(of_row=pool[table.mine], is_shared=is_shared, num_own=num_own, num_zeros=num_zeros)


def _row_ranges(
    shares: Shares, is_correct: Tensor, sides: tuple[SideRule, SideRule], penalty: Tensor
) -> tuple[Tensor, Tensor]:
    ends = [
        torch.where(is_correct, sides[1].reward(share), sides[0].reward(share)) + penalty
        for share in (shares.lowest, shares.highest)
    ]
    return torch.minimum(*ends), torch.maximum(*ends)


def _pool_ranges(
    pools: _Pools, included: Tensor, low: Tensor, high: Tensor, reduction: Reduction
) -> tuple[Tensor, Tensor, Tensor]:
    """Middle, half width and largest magnitude of each pool's values; 0 for a pool without any."""
    ends = torch.full((2, len(pools.num_own)), -math.inf, dtype=torch.float64)
    ends[0].scatter_reduce_(0, pools.of_row[included], high[included], "amax")
    ends[1].scatter_reduce_(0, pools.of_row[included], -low[included], "amax")
    ends[:, pools.is_shared] = reduction.max(ends[:, pools.is_shared])
    ends = torch.where(pools.num_zeros > 0, ends.clamp(min=0.0), ends)
    ends = torch.where(torch.isfinite(ends), ends, 0.0)
    return (ends[0] - ends[1]) / 2, (ends[0] + ends[1]) / 2, ends.abs().amax(0)


def _pool_sums(
    rows: "_RowRewards",
    pools: _Pools,
    included: Tensor,
    center: Tensor,
    inverse_half: Tensor,
    longest: int,
    reduction: Reduction,
) -> Tensor:
    """``[2, P]`` float64: sums of the own values' deviations, in units of half the range, and of their squares."""
    magic, grid_bits = rounding_constant(longest)
    row_sums = rows.deviation_sums(center[pools.of_row], inverse_half[pools.of_row], magic)
    limbs = to_limbs((row_sums * 2.0**grid_bits).to(torch.int64))
    sums = torch.zeros(2, len(pools.num_own), 2, dtype=torch.int64)
    sums.index_add_(1, pools.of_row[included], limbs[:, included])
    sums[:, pools.is_shared] = reduction.sum(sums[:, pools.is_shared])
    return from_limbs(sums) / 2.0**grid_bits


def _mean_and_std(pools: _Pools, totals: Tensor, center: Tensor, half: Tensor, rule: PoolRule) -> tuple[Tensor, Tensor]:
    zero = torch.where(half > 0, -center / torch.where(half > 0, half, 1.0), 0.0)
    count = (pools.num_own + pools.num_zeros).to(torch.float64)
    first = totals[0] + pools.num_zeros * zero
    second = totals[1] + pools.num_zeros * zero * zero
    mean = first / count.clamp(min=1)
    variance = (second - first * mean).clamp(min=0.0) / (count - rule.ddof).clamp(min=1)
    return center + half * mean, half * variance.sqrt()


class _RowRewards:
    """The shaped rewards of this rank as a function of the shares; made block by block, never stored in float64."""

    def __init__(
        self, values: Tensor, lengths: Tensor, is_correct: Tensor, sides: tuple[SideRule, SideRule], penalty: Tensor
    ) -> None:
        def by_row(wrong: float, correct: float) -> Tensor:
            return torch.where(is_correct, correct, wrong).to(torch.float64).to(values.device)

        self.values = values
        self.width = int(lengths.max()) if len(lengths) else 0
        self.num_padding = (self.width - lengths).to(torch.float64).to(values.device)
        self.base = by_row(sides[0].base, sides[1].base)
        self.slope = by_row(sides[0].slope, sides[1].slope)
        self.is_clipped = sides[0].is_clipped or sides[1].is_clipped
        self.low, self.high = by_row(sides[0].low, sides[1].low), by_row(sides[0].high, sides[1].high)
        self.penalty = penalty.to(values.device)

    def _affine(self, shares: Tensor, part: slice, shift: Tensor, factor: Tensor) -> Tensor:
        """``(reward - shift) * factor`` of the shares of some rows, float64."""
        block = shares.to(torch.float64, copy=True)
        if self.is_clipped:
            block = block.mul_(self.slope[part, None]).add_(self.base[part, None])
            block = torch.minimum(torch.maximum(block, self.low[part, None]), self.high[part, None])
            return block.add_((self.penalty - shift)[part, None]).mul_(factor[part, None])
        offset = (self.base + self.penalty - shift) * factor
        return block.mul_((self.slope * factor)[part, None]).add_(offset[part, None])

    def deviation_sums(self, center: Tensor, inverse_half: Tensor, magic: float) -> Tensor:
        """``[2, B]`` float64 on the CPU: exact sums over a row's tokens of gridded deviations and their squares.

        Padding has share 0, hence one known deviation a row: its contribution is taken off instead of masked out.
        """
        values = self.values
        center, inverse_half = center.to(values.device), inverse_half.to(values.device)
        sums = torch.zeros(2, len(values), dtype=torch.float64, device=values.device)
        padding = values.new_zeros(len(values), 1)
        for first, last in row_blocks(values[:, : self.width]):
            part = slice(first, last)
            live = self._grid_sums(values[part, : self.width], part, center, inverse_half, magic)
            none = self._grid_sums(padding[part], part, center, inverse_half, magic)
            sums[:, part] = live - self.num_padding[part] * none
        return sums.cpu()

    def _grid_sums(self, shares: Tensor, part: slice, center: Tensor, inverse_half: Tensor, magic: float) -> Tensor:
        deviation = self._affine(shares, part, center, inverse_half).clamp_(-1.0, 1.0)
        square = deviation.square()
        return torch.stack((deviation.add_(magic).sub_(magic).sum(1), square.add_(magic).sub_(magic).sum(1)))

    def apply(self, response_mask: Tensor, mean: Tensor, factor: Tensor) -> Standardised:
        """Writes rewards and advantages; the latter over the shares where the dtype allows."""
        values, width = self.values, self.width
        mean, factor = mean.to(values.device), factor.to(values.device)
        none, one = torch.zeros_like(mean), torch.ones_like(mean)
        shaped = torch.zeros(values.shape, dtype=torch.float32, device=values.device)
        advantages = values if values.dtype == torch.float32 else torch.zeros_like(shaped)
        for first, last in row_blocks(values[:, :width]):
            part = slice(first, last)
            live = response_mask[part, :width].to(torch.float32)
            shares = values[part, :width]
            shaped[part, :width] = self._affine(shares, part, none, one)
            advantages[part, :width] = self._affine(shares, part, mean, factor)
            shaped[part, :width] *= live
            advantages[part, :width] *= live
        return Standardised(shaped_rewards=shaped, advantages=advantages)
