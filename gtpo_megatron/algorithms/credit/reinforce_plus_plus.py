"""REINFORCE++: rewards standardised over the whole batch (arXiv 2501.03262)."""

import torch

from gtpo_megatron.algorithms.batch.reduction import LocalReduction
from gtpo_megatron.algorithms.credit.credit_batch import CreditBatch, TokenCredit
from gtpo_megatron.algorithms.credit.group_relative import group_centred
from gtpo_megatron.algorithms.credit.standardise import REWARD_ROUNDING, pools, standardise
from gtpo_megatron.config.algorithm import REINFORCEPlusPlusConfig


def reinforce_plus_plus_credit(config: REINFORCEPlusPlusConfig, batch: CreditBatch) -> TokenCredit:
    """``A_i = (b_i - mean(b)) / (std(b) + eps)`` over the batch (Eq. 5, 7); 0 if all ``b`` are equal but for rounding.

    ``b_i = r_i``, the return of every token without a KL term (Eq. 4); with ``baseline="group"`` it is
    ``r_i - mean(r)`` over the group (Eq. 6), 0 in groups of one. ``r`` includes the length penalty.

    Collectives, for ``statistics="tokens"``: those of ``standardise``, for one pool.
    """
    table = batch.table
    base = group_centred(config, batch) if config.baseline == "group" else batch.outcome
    by_tokens = config.statistics == "tokens"
    sizes = table.lengths if by_tokens else table.is_live.to(torch.int64)
    pooled = pools(table, sizes, "combined", spans_batch=True, takes_part=table.is_live)
    credit = batch.of_responses(batch.outcome, base)
    advantage = standardise(
        credit.advantages if by_tokens else base,
        batch.on_tokens(pooled.index) if by_tokens else pooled.index[table.is_live],
        pooled,
        ddof=config.std_ddof,
        eps=config.std_eps,
        reduction=batch.reduction if by_tokens else LocalReduction(),
        rounding=REWARD_ROUNDING,
    )
    if by_tokens:
        return TokenCredit(shaped_rewards=credit.shaped_rewards, advantages=advantage)
    return batch.of_responses(batch.outcome, advantage)
