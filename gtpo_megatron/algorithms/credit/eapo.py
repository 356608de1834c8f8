"""EAPO: an advantage reallocated by entropy within its group (arXiv 2604.11056v1)."""

from dataclasses import replace

from gtpo_megatron.algorithms.credit.credit_batch import CreditBatch, TokenCredit
from gtpo_megatron.algorithms.credit.group_relative import group_relative_credit
from gtpo_megatron.algorithms.credit.standardise import pools, standardise
from gtpo_megatron.config.algorithm import EAPOConfig


def eapo_credit(config: EAPOConfig, batch: CreditBatch) -> TokenCredit:
    """``A + alpha sign(A) A_H`` (Eq. 7), ``A`` being GRPO's; ``A_H = clip((H - mu) / sigma, +-|A| / phi)`` (Eq. 6).

    ``mu`` and ``sigma`` are the mean and the std of the entropies of all tokens of the group; ``A_H = 0`` if they
    are equal. ``alpha`` is ``coefficient``, ``phi`` is ``bound``.

    Collectives: those of ``standardise``, one pool per group.
    """
    table, credit = batch.table, group_relative_credit(config, batch)
    pooled = pools(table, table.lengths, "combined", spans_batch=False, takes_part=table.is_live)
    score = standardise(  # (H - mu) / sigma
        batch.entropy,
        batch.on_tokens(pooled.index),
        pooled,
        ddof=config.std_ddof,
        eps=config.std_eps,
        reduction=batch.reduction,
    )
    limit = credit.advantages.abs() / config.bound
    correction = config.coefficient * credit.advantages.sign() * score.clamp(-limit, limit)
    return replace(credit, advantages=credit.advantages + correction)
