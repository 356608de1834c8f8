"""Advantages relative to the response's group: GRPO (arXiv 2402.03300), and Dr.GRPO's without the std (2503.20783)."""

from torch import Tensor

from gtpo_megatron.algorithms.pools import Standardised, standardise
from gtpo_megatron.algorithms.reduction import LocalReduction
from gtpo_megatron.algorithms.responses import one_token_table, response_values
from gtpo_megatron.algorithms.shaping import PoolRule, ShapingRules, SideRule
from gtpo_megatron.algorithms.share_grid import ShareRule
from gtpo_megatron.algorithms.table import ResponseTable

_IDENTITY = SideRule(base=0.0, slope=1.0)


def group_relative_credit(
    table: ResponseTable, *, penalties: Tensor, ddof: int, eps: float, divides_by_std: bool
) -> Standardised:
    """``A_i = (r_i - mean(r)) / (std(r) + eps)`` over the responses of the group, ``r`` with the length penalty.

    Args:
        table: of the batch.
        penalties: ``[R]`` float64.
        ddof: 0 or 1.
        eps: added to the std.
        divides_by_std: False leaves ``A_i = r_i - mean(r)``.

    Returns:
        ``[R, 1]`` on the CPU; 0 in groups of one and in groups of equal rewards.
    """
    pool = PoolRule(spans_batch=False, kind="combined", ddof=ddof, eps=eps, divides_by_std=divides_by_std)
    return standardise(
        response_values(table.rewards),
        table.is_live[:, None],
        one_token_table(table, table.rewards),
        ShapingRules(share=ShareRule(), sides=(_IDENTITY, _IDENTITY), pool=pool),
        LocalReduction(),
        penalties=penalties,
        is_pooled=table.is_live,
    )
