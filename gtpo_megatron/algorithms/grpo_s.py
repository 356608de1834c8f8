"""GRPO-S: sequence-level reward shaping by entropy (arXiv 2508.04349); credit only, its loss is in ``policy_loss``."""

from torch import Tensor

from gtpo_megatron.algorithms.pools import Standardised, standardise
from gtpo_megatron.algorithms.reduction import LocalReduction
from gtpo_megatron.algorithms.responses import one_token_table
from gtpo_megatron.algorithms.shaping import ShapingRules
from gtpo_megatron.algorithms.share_grid import TokenWeights
from gtpo_megatron.algorithms.shares import Shares, entropy_shares
from gtpo_megatron.algorithms.table import ResponseTable


def grpo_s_credit(
    table: ResponseTable,
    sequence_weights: Tensor,
    rules: ShapingRules,
    *,
    penalties: Tensor,
    is_pooled: Tensor,
    name: str = "mean token_entropy",
) -> tuple[Standardised, Shares]:
    """Shaped rewards and advantages of whole responses [S 5-6, 17-18; I 8-9].

    ``X[i] = Hs[i] / sum_{O+} Hs * n``, ``Y[j] = (1/Hs[j]) / sum_{O-} (1/Hs) * m``. All ``R`` responses are computed on
    every rank from numbers that all ranks hold, so nothing more needs to travel.

    Args:
        table: of the batch.
        sequence_weights: ``[R]`` float64, ``Hs`` or what stands in its place.
        rules: how they are compared (axis ``position``), shaped and standardised.
        penalties: ``[R]`` float64.
        is_pooled: ``[R]`` bool.
        name: of the weights, for messages.

    Returns:
        ``[R, 1]`` on the CPU.
    """
    reduction = LocalReduction()
    column = one_token_table(table, sequence_weights)
    mask = table.is_live[:, None]
    tokens = TokenWeights(values=sequence_weights[:, None].clone(), response_mask=mask, name=name)
    shares = entropy_shares(tokens, column, rules.share, reduction)
    result = standardise(shares, mask, column, rules, reduction, penalties=penalties, is_pooled=is_pooled)
    return result, shares
