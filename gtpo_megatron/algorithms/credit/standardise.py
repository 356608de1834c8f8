"""Standardises rewards by the mean and the standard deviation of their pool [S 3, 14; I 5-6, 9]."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gtpo_megatron.algorithms.sums import Reduction, combine_by_key_, exact_sum
from gtpo_megatron.algorithms.token_batch import CreditBatch
from gtpo_megatron.config.algorithm.entropy_credit import Pool

ROUNDING = 1e-12
"""Relative std of values that differ by float64's rounding only: shaped rewards."""

REWARD_ROUNDING = 2.0**-22
"""That of outcome rewards, which are float32: sums of one value, added in other orders, are up to 2 steps apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pools:
    """The sets that values are standardised over. The last one holds values that take no part: advantage 0.

    Attributes:
        index: ``[N]`` integers in [0, P), the pool of each value.
        num_values: ``[P]`` int64, number of values in each pool, over all ranks.
        num_zeros: ``[P]`` int64, number of further zeros in each pool: rewards of the other side.
        reduction: the ranks that hold the values.
    """

    index: Tensor
    num_values: Tensor
    num_zeros: Tensor
    reduction: Reduction


def token_pools(batch: CreditBatch, kind: Pool, *, spans_batch: bool, takes_part: Tensor) -> Pools:
    """The pools of this rank's tokens.

    ``joint_zero``: R+ holds ``r+`` of all tokens of the scope, 0 on O-; R- holds ``r-``, 0 on O+.
    ``per_set``: R+ holds the values of O+ only, R- those of O-. ``combined``: one pool, ``r+`` on O+ and ``r-`` on O-.

    Args:
        batch: the tokens.
        kind: values that a pool holds, as above.
        spans_batch: the scope is the batch instead of the group.
        takes_part: ``[R]`` bool; the tokens of other responses are in no pool.
    """
    pool, num_values, num_zeros = _pools(batch, batch.table.lengths, kind, spans_batch, takes_part)
    index = batch.on_tokens(pool.to(torch.int32))
    return Pools(index=index, num_values=num_values, num_zeros=num_zeros, reduction=batch.reduction)


def response_pools(batch: CreditBatch, kind: Pool, *, spans_batch: bool, takes_part: Tensor) -> Pools:
    """The pools of one value per response with tokens; see ``token_pools``. Every rank holds all of them."""
    is_live = batch.table.is_live
    pool, num_values, num_zeros = _pools(batch, is_live.to(torch.int64), kind, spans_batch, takes_part)
    return Pools(index=pool[is_live], num_values=num_values, num_zeros=num_zeros, reduction=Reduction())


def _pools(
    batch: CreditBatch, sizes: Tensor, kind: Pool, spans_batch: bool, takes_part: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The pool of each response ``[R]``, and the numbers of values and of zeros ``[P]``; ``sizes`` ``[R]``: values."""
    table = batch.table
    side, num_pools = (table.scopes if kind == "combined" else table.sides)(spans_batch=spans_batch)
    pool = torch.where(takes_part, side, num_pools)
    num_values = torch.zeros(num_pools + 1, dtype=torch.int64).index_add_(0, pool, sizes)
    num_zeros = torch.zeros_like(num_values)
    if kind == "joint_zero":
        num_zeros[:-1] = num_values[:-1].view(-1, 2).flip(1).flatten()  # the values of the other side
    return pool, num_values, num_zeros


def standardise(
    reward: Tensor,
    pools: Pools,
    *,
    ddof: int,
    eps: float,
    divides_by_std: bool = True,
    rounding: float = ROUNDING,
) -> Tensor:
    """``A = (r - mean(pool)) / (std(pool) + eps)``; 0 in a constant pool or one of at most ``ddof`` values.

    The lowest value of the pool is subtracted first, so the std of equal values is exactly 0, and differences of close
    values keep all digits. A pool is constant if ``std <= rounding * max(1, |lowest|)``: what is left is rounding of
    the values themselves, such as of 0.1 + 0.2 beside 0.3, and would be blown up to unit variance.

    Args:
        reward: ``[N]`` float64.
        pools: pools of the values. Collectives: of its reduction three ``max`` and two ``sum`` more.
        ddof: the variance divides by ``n - ddof``.
        eps: added to the std.
        divides_by_std: False: only subtract the mean (Dr.GRPO).
        rounding: relative std up to which a pool is constant, as above.
    """
    pool, reduction = pools.index, pools.reduction
    num_values, num_zeros = pools.num_values.to(reward.device), pools.num_zeros.to(reward.device)
    count = (num_values + num_zeros).to(torch.float64)
    lowest = torch.full_like(count, torch.inf).scatter_reduce_(0, pool.to(torch.int64), reward, "amin")
    lowest = -reduction.max(-torch.where(num_zeros > 0, lowest.clamp(max=0.0), lowest))
    excess = combine_by_key_(reward.clone(), Tensor.sub_, lowest, pool)
    zero = torch.where(num_zeros > 0, -lowest, 0.0)  # a zero, relative to the lowest value

    mean = (exact_sum(excess, pool, num_values, reduction).total + num_zeros * zero) / count.clamp(min=1)
    deviation = combine_by_key_(excess, Tensor.sub_, mean, pool)
    squares = exact_sum(deviation.square(), pool, num_values, reduction).total + num_zeros * (zero - mean).square()
    std = (squares / (count - ddof).clamp(min=1)).sqrt()

    factor = 1.0 / (std + eps) if divides_by_std else torch.ones_like(std)
    factor = torch.where((std > rounding * lowest.abs().clamp(min=1.0)) & (count > ddof), factor, 0.0)
    factor[-1] = 0.0  # the last pool: values that take no part
    return combine_by_key_(deviation, Tensor.mul_, factor, pool)
