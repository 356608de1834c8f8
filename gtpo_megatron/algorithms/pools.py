"""Shaped rewards from shares, and advantages from them: ``A = (r - mean(pool)) / std(pool)`` [S 3, 14; I 5, 6].

Pools: ``joint_zero`` gives each side (correct, wrong) its own pool of all values of the scope, the other side's being
    0;
``per_set`` its own values only; ``combined`` makes one pool of both sides.

Exactness: sums over a row are of terms on a grid of its own (``row_sums``); from them follow those of the deviations
from the middle of the pool's range, in units of half of it, and rows are added as integers. Range, sums and counts are
the same for any dealing, and so are mean and std. Rows are added in steps of ``2 ** -(61 - log2 longest)``, where the
std is at least 1 / sqrt(number of values).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gtpo_megatron.algorithms.fixed_point import INTEGER_BITS, from_limbs, to_limbs
from gtpo_megatron.algorithms.reduction import Reduction
from gtpo_megatron.algorithms.row_sums import sums_and_squares
from gtpo_megatron.algorithms.rows import length_blocks
from gtpo_megatron.algorithms.scratch import Scratch, lazy_zeros
from gtpo_megatron.algorithms.shaping import PoolRule, ShapingRules, SideRule
from gtpo_megatron.algorithms.shares import Shares
from gtpo_megatron.algorithms.table import ResponseTable

ZERO_STD = 1e-12
"""A std up to this times max(1, largest magnitude) is rounding noise of a constant pool and counts as 0."""

SMALLEST_HALF = 1e-290
"""Half ranges below this have no finite inverse and count as 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Standardised:
    """Rewards and advantages of this rank's tokens, ``[B, T]`` float32, zero outside the mask.

    Attributes:
        flips: ``[B]`` float64 on the CPU, tokens whose advantage has the sign that the outcome has not.
    """

    shaped_rewards: Tensor
    advantages: Tensor
    flips: Tensor


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
    rows = _RowRewards(shares, response_mask, table.lengths[mine], is_correct, rules.sides, penalty)
    longest = int(table.lengths.max()) if len(table.lengths) else 0
    where = (center[pools.of_row], inverse_half[pools.of_row])
    row_sums = rows.clipped_sums(*where, longest) if rows.is_clipped else rows.affine_sums(*where)
    totals = _pool_sums(row_sums, INTEGER_BITS - 1 - longest.bit_length(), pools, included, reduction)
    mean, std = _mean_and_std(pools, totals, center, half, rule)
    is_constant = std <= ZERO_STD * largest.clamp(min=1.0)
    factor = 1.0 / (std + rule.eps) if rule.divides_by_std else torch.ones_like(std)
    factor = torch.where(is_constant | (pools.num_own + pools.num_zeros <= rule.ddof), 0.0, factor)
    factor = torch.where(included, factor[pools.of_row], 0.0)
    return rows.apply(mean[pools.of_row], factor, may_be_narrow=rules.share.may_be_narrow)


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


def _pool_sums(row_sums: Tensor, grid_bits: int, pools: _Pools, included: Tensor, reduction: Reduction) -> Tensor:
    """``[2, P]`` float64: sums of the own values' deviations, in units of half the range, and of their squares."""
    limbs = to_limbs(torch.round(row_sums * 2.0**grid_bits).to(torch.int64))
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
        self,
        shares: Shares,
        response_mask: Tensor,
        lengths: Tensor,
        is_correct: Tensor,
        sides: tuple[SideRule, SideRule],
        penalty: Tensor,
    ) -> None:
        self.shares, self.values, self.response_mask = shares, shares.values, response_mask
        self.order, self.blocks = length_blocks(lengths, self.values)
        self.lengths, self.is_correct = lengths, is_correct
        self.scratch = Scratch(self.values.device)

        def by_row(wrong: float, correct: float) -> Tensor:
            return torch.where(is_correct, correct, wrong).to(torch.float64)

        self.slope = by_row(sides[0].slope, sides[1].slope)
        self.base = by_row(sides[0].base, sides[1].base) + self.slope * shares.origin
        self.penalty = penalty
        self.is_clipped = sides[0].is_clipped or sides[1].is_clipped
        self.low, self.high = by_row(sides[0].low, sides[1].low), by_row(sides[0].high, sides[1].high)

    def _ordered(self, by_row: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
        """``[B]`` on the CPU -> ``[B, 1]`` in the order of the blocks, on the values' device."""
        return by_row[self.order].to(self.values.device, dtype)[:, None]

    def _affine(
        self, shift: Tensor, factor: Tensor, dtype: torch.dtype = torch.float64
    ) -> Callable[[Tensor, slice, Tensor], Tensor]:
        """A function that writes ``(reward - shift) * factor`` of a block of shares less their origin.

        Args:
            shift: ``[B]`` float64.
            factor: ``[B]`` float64.
            dtype: of the block.
        """
        if not self.is_clipped:
            scale = self._ordered(self.slope * factor, dtype)
            offset = self._ordered((self.base + self.penalty - shift) * factor, dtype)
            return lambda block, part, out: torch.mul(block, scale[part], out=out).add_(offset[part])
        slope, base = self._ordered(self.slope, dtype), self._ordered(self.base, dtype)
        low, high = self._ordered(self.low, dtype), self._ordered(self.high, dtype)
        shift, factor = self._ordered(self.penalty - shift, dtype), self._ordered(factor, dtype)

        def clipped(block: Tensor, part: slice, out: Tensor) -> Tensor:
            torch.mul(block, slope[part], out=out).add_(base[part])
            torch.maximum(out, low[part], out=out)
            torch.minimum(out, high[part], out=out)
            return out.add_(shift[part]).mul_(factor[part])

        return clipped

    def clipped_sums(self, center: Tensor, inverse_half: Tensor, longest: int) -> Tensor:
        """``[2, B]`` float64 on the CPU: sums over a row's tokens of deviations and of their squares.

        Args:
            center: ``[B]`` float64, of each row's pool.
            inverse_half: ``[B]`` float64, of the width of each row's pool; deviations are counted in halves.
            longest: tokens of the longest response of the batch.
        """
        sums = torch.zeros(2, len(self.values), dtype=torch.float64, device=self.values.device)
        deviations = self._affine(center, inverse_half)
        for block in self.blocks:
            shares = self.scratch.copy("shares", block.pick(self.values, self.scratch, "picked"), torch.float64)
            deviation = deviations(shares, block.part, self._like("deviation", shares)).clamp_(-1.0, 1.0)
            block.clear_padding(deviation, self.response_mask)
            ones = torch.ones_like(sums[0, block.part])
            sums_and_squares(deviation, ones, longest, squares=shares, out=sums[:, block.part])
        by_row = torch.empty(2, len(self.values), dtype=torch.float64)
        by_row[:, self.order] = sums.cpu()
        return by_row

    def affine_sums(self, center: Tensor, inverse_half: Tensor) -> Tensor:
        """The same where rewards are ``a + b v``, from the sums of the shares, without another look at the tokens.

        ``sum (a + b v) = a n + b sum v``, ``sum (a + b v)^2 = a^2 n + 2 a b sum v + b^2 sum v^2``.
        """
        shares, slope = self.shares, self.slope * inverse_half
        shift = (self.base + self.penalty - center) * inverse_half
        first = shift * self.lengths + slope * shares.total
        second = shift * shift * self.lengths + 2 * shift * slope * shares.total
        return torch.stack((first, second + slope * slope * shares.total_square))

    def apply(self, mean: Tensor, factor: Tensor, *, may_be_narrow: bool) -> Standardised:
        """Writes rewards and advantages; the latter over the shares where the dtype allows.

        Args:
            mean: ``[B]`` float64, of each row's pool.
            factor: ``[B]`` float64, inverse std of each row's pool.
            may_be_narrow: rewards of a pool may be so close that float32 would lose their difference from the mean. In
                ``a + b v`` it does not, since ``v`` is a difference already; clipping needs the reward itself.
        """
        values = self.values
        dtype = torch.float64 if may_be_narrow and self.is_clipped else values.dtype
        shaped = lazy_zeros(values.shape, torch.float32, values.device)
        in_place = values.dtype == torch.float32
        advantages = values if in_place else lazy_zeros(values.shape, torch.float32, values.device)
        to_reward = self._affine(torch.zeros_like(mean), torch.ones_like(mean), dtype)
        to_advantage = self._affine(mean, factor, dtype)
        flips = torch.zeros(len(values), dtype=torch.float32, device=values.device)
        outward = self._ordered(torch.where(self.is_correct, 1.0, -1.0), torch.float32)
        for block in self.blocks:
            shares = block.pick(values, self.scratch, "picked")
            shares = shares if shares.dtype == dtype else self.scratch.copy("shares", shares, dtype)
            for function, target in ((to_reward, shaped), (to_advantage, advantages)):
                exact = function(shares, block.part, self._like("affine", shares))
                rounded = exact if dtype == torch.float32 else self.scratch.copy("rounded", exact, torch.float32)
                block.clear_padding(rounded, self.response_mask)
                block.put(rounded, target)
            inward = rounded.mul_(outward[block.part]).clamp_(max=0.0).sign_()
            torch.sum(inward, 1, out=flips[block.part])
        by_row = torch.empty(len(values), dtype=torch.float64)
        by_row[self.order] = -flips.cpu().to(torch.float64)
        return Standardised(shaped_rewards=shaped, advantages=advantages, flips=by_row)

    def _like(self, name: str, block: Tensor) -> Tensor:
        return self.scratch.take(name, tuple(block.shape), block.dtype)
