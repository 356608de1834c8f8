"""GTPO: token-level reward shaping by entropy (arXiv 2508.04349); credit only, its loss is ``clipped_surrogate``."""

from torch import Tensor

from gtpo_megatron.algorithms.pools import Standardised, standardise
from gtpo_megatron.algorithms.reduction import Reduction
from gtpo_megatron.algorithms.shaping import ShapingRules
from gtpo_megatron.algorithms.share_grid import TokenWeights
from gtpo_megatron.algorithms.shares import Shares, entropy_shares
from gtpo_megatron.algorithms.table import ResponseTable


def gtpo_credit(
    tokens: TokenWeights,
    table: ResponseTable,
    rules: ShapingRules,
    reduction: Reduction,
    *,
    penalties: Tensor,
    is_pooled: Tensor,
) -> tuple[Standardised, Shares]:
    """Shaped token rewards and token advantages [S 2-3, 11-15; I 3-6].

    ``r[i,t] = rule(x[i,t]) + R_i`` on correct, ``rule(y[i,t]) + R_i`` on wrong responses, then standardised.

    Args:
        tokens: of this rank.
        table: of the batch.
        rules: how entropies are compared, shaped and standardised.
        reduction: see ``entropy_shares`` and ``standardise``.
        penalties: ``[R]`` float64 length penalties.
        is_pooled: ``[R]`` bool.

    Returns:
        Rewards and advantages, and the shares with their ``values`` overwritten.
    """
    shares = entropy_shares(tokens, table, rules.share, reduction)
    result = standardise(
        shares, tokens.response_mask, table, rules, reduction, penalties=penalties, is_pooled=is_pooled
    )
    return result, shares
