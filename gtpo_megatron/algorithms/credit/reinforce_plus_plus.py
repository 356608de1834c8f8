"""REINFORCE++: rewards standardised over the whole batch (arXiv 2501.03262)."""

from dataclasses import replace

from gtpo_megatron.algorithms.credit.group_relative import group_centred
from gtpo_megatron.algorithms.credit.standardise import REWARD_ROUNDING, response_pools, standardise, token_pools
from gtpo_megatron.algorithms.token_batch import CreditBatch
from gtpo_megatron.batch import Credit
from gtpo_megatron.config.algorithm import REINFORCEPlusPlusConfig


def reinforce_plus_plus_credit(config: REINFORCEPlusPlusConfig, batch: CreditBatch) -> Credit:
    """``A_i = (b_i - mean(b)) / (std(b) + eps)`` over the batch (Eq. 5, 7); 0 if all ``b`` are equal but for rounding.

    ``b_i = r_i``, the return of every token without a KL term (Eq. 4); with ``baseline="group"`` it is
    ``r_i - mean(r)`` over the group (Eq. 6), 0 in groups of one. ``r`` includes the length penalty.

    Collectives, for ``statistics="tokens"``: those of ``standardise``, for one pool.
    """
    by_tokens = config.statistics == "tokens"
    base = group_centred(config, batch) if config.baseline == "group" else batch.outcome
    credit = batch.of_responses(batch.outcome, base)
    pools = token_pools if by_tokens else response_pools
    advantage = standardise(
        credit.advantages if by_tokens else base,
        pools(batch, "combined", spans_batch=True, takes_part=batch.table.is_live),
        ddof=config.std_ddof,
        eps=config.std_eps,
        rounding=REWARD_ROUNDING,
    )
    return replace(credit, advantages=advantage) if by_tokens else batch.of_responses(batch.outcome, advantage)
