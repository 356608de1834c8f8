"""EAPO: an advantage reallocated by entropy within its group (arXiv 2604.11056v1)."""

from dataclasses import replace

from gtpo_megatron.algorithms.credit.group_relative import group_relative_credit
from gtpo_megatron.algorithms.credit.standardise import standardise, token_pools
from gtpo_megatron.algorithms.token_batch import CreditBatch
from gtpo_megatron.batch import Credit
from gtpo_megatron.config.algorithm import EAPOConfig


def eapo_credit(config: EAPOConfig, batch: CreditBatch) -> Credit:
    """``A + alpha sign(A) A_H`` (Eq. 7), ``A`` being GRPO's; ``A_H = clip((H - mu) / sigma, +-|A| / phi)`` (Eq. 6).

    ``mu`` and ``sigma`` are the mean and the std of the entropies of all tokens of the group; ``A_H = 0`` if they
    are equal. ``alpha`` is ``coefficient``, ``phi`` is ``bound``.

    Collectives: those of ``standardise``, one pool per group.
    """
    credit = group_relative_credit(config, batch)
    groups = token_pools(batch, "combined", spans_batch=False, takes_part=batch.table.is_live)
    score = standardise(batch.entropy, groups, ddof=config.std_ddof, eps=config.std_eps)  # (H - mu) / sigma
    limit = credit.advantages.abs() / config.bound
    correction = config.coefficient * credit.advantages.sign() * score.clamp(-limit, limit)
    return replace(credit, advantages=credit.advantages + correction)
