"""Standardises rewards by the mean and the standard deviation of their pool [S 3, 14; I 5-6, 9]."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gtpo_megatron.algorithms.batch.reduction import Reduction
from gtpo_megatron.algorithms.batch.response_table import ResponseTable
from gtpo_megatron.algorithms.exact_sum import combine_by_key_, exact_sum, parts

ROUNDING = 1e-12
"""Relative std of values that differ by float64's rounding only: shaped rewards."""

REWARD_ROUNDING = 2.0**-22
"""That of outcome rewards, which are float32: sums of one value, added in other orders, are up to 2 steps apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pools:
    """The sets that rewards are standardised over. The last one holds values that take no part: advantage 0.

    Attributes:
        index: ``[R]`` int32 in [0, P), the pool of each response.
        own: ``[P]`` int64, number of values in each pool.
        zeros: ``[P]`` int64, number of further zeros in each pool.
    """

    index: Tensor
    own: Tensor
    zeros: Tensor


def pools(
    table: ResponseTable,
    sizes: Tensor,
    kind: Literal["joint_zero", "per_set", "combined"],
    *,
    spans_batch: bool,
    takes_part: Tensor,
) -> Pools:
    """Assigns the responses of a batch to pools.

    ``joint_zero``: R+ holds ``r+`` of all responses of the scope, 0 on O-; R- holds ``r-``, 0 on O+.
    ``per_set``: R+ holds the values of O+ only, R- those of O-. ``combined``: one pool, ``r+`` on O+ and ``r-`` on O-.

    Args:
        table: the responses of the batch.
        sizes: ``[R]`` int64, number of values per response: its tokens, or 1.
        kind: see above.
        spans_batch: the scope is the batch instead of the group.
        takes_part: ``[R]`` bool; other responses are in no pool.
    """
    scope = table.scope(spans_batch=spans_batch)
    num_pools = table.num_scopes(spans_batch=spans_batch)
    if kind != "combined":
        scope, num_pools = 2 * scope + table.is_correct, 2 * num_pools
    index = torch.where(takes_part, scope, num_pools)
    own = torch.zeros(num_pools + 1, dtype=torch.int64).index_add_(0, index, sizes)
    zeros = torch.zeros_like(own)
    if kind == "joint_zero":
        zeros[:-1] = own[:-1].view(-1, 2).flip(1).flatten()  # the tokens of the other side
    return Pools(index=index.to(torch.int32), own=own, zeros=zeros)


def standardise(
    reward: Tensor,
    pool: Tensor,
    pools: Pools,
    *,
    ddof: int,
    eps: float,
    reduction: Reduction,
    divides_by_std: bool = True,
    rounding: float = ROUNDING,
) -> Tensor:
    """``A = (r - mean(pool)) / (std(pool) + eps)``; 0 in a constant pool or one of at most ``ddof`` values.

    The lowest value of the pool is subtracted first, so the std of equal values is exactly 0, and differences of close
    values keep all digits. A pool is constant if ``std <= rounding * max(1, |lowest|)``: what is left is rounding of
    the values themselves, such as of 0.1 + 0.2 beside 0.3, and would be blown up to unit variance.

    Args:
        reward: ``[N]`` float64.
        pool: ``[N]`` integers, the pool of each value.
        pools: sizes of the pools over all ranks.
        ddof: the variance divides by ``n - ddof``.
        eps: added to the std.
        reduction: the ranks that hold values of these pools.
        divides_by_std: False: only subtract the mean (Dr.GRPO).
        rounding: see above.
    """
    own, zeros = pools.own.to(reward.device), pools.zeros.to(reward.device)
    count = (own + zeros).to(torch.float64)
    lowest = torch.full_like(count, torch.inf)
    for part, k in parts(reward, pool):
        lowest.scatter_reduce_(0, k, part, "amin")
    lowest = -reduction.max(torch.where(zeros > 0, lowest.clamp(max=0.0), lowest).neg_())
    excess = combine_by_key_(reward.clone(), Tensor.sub_, lowest, pool)
    zero = torch.where(zeros > 0, -lowest, 0.0)  # a zero, relative to the lowest value

    mean = (exact_sum(excess, pool, own, reduction).total + zeros * zero) / count.clamp(min=1)
    deviation = combine_by_key_(excess, Tensor.sub_, mean, pool)
    squares = exact_sum(deviation, pool, own, reduction, term=torch.square).total + zeros * (zero - mean).square()
    std = (squares / (count - ddof).clamp(min=1)).sqrt()

    factor = 1.0 / (std + eps) if divides_by_std else torch.ones_like(std)
    factor = torch.where((std > rounding * lowest.abs().clamp(min=1.0)) & (count > ddof), factor, 0.0)
    factor[-1] = 0.0  # the last pool: values that take no part
    return combine_by_key_(deviation, Tensor.mul_, factor, pool)
