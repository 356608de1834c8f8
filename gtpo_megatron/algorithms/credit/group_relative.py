"""Advantages relative to the response's group: GRPO (arXiv 2402.03300), and Dr.GRPO's without the std (2503.20783)."""

from torch import Tensor

from gtpo_megatron.algorithms.credit.standardise import REWARD_ROUNDING, response_pools, standardise
from gtpo_megatron.algorithms.token_batch import CreditBatch
from gtpo_megatron.batch import Credit
from gtpo_megatron.config.algorithm import AlgorithmConfig


def group_relative_credit(config: AlgorithmConfig, batch: CreditBatch) -> Credit:
    """``A_i = (r_i - mean(r)) / (std(r) + eps)`` over the responses of the group, ``r`` being ``CreditBatch.outcome``.

    0 in groups of one and in groups of rewards that are equal but for rounding.
    """
    return batch.of_responses(batch.outcome, _relative_to_group(config, batch, divides_by_std=True))


def group_centred_credit(config: AlgorithmConfig, batch: CreditBatch) -> Credit:
    """``A_i = r_i - mean(r)`` over the responses of the group, ``r`` being ``CreditBatch.outcome``."""
    return batch.of_responses(batch.outcome, group_centred(config, batch))


def group_centred(config: AlgorithmConfig, batch: CreditBatch) -> Tensor:
    """``r_i - mean(r)`` over the responses of the group, ``[L]``; exactly 0 if all are equal but for rounding."""
    return _relative_to_group(config, batch, divides_by_std=False)


def _relative_to_group(config: AlgorithmConfig, batch: CreditBatch, *, divides_by_std: bool) -> Tensor:
    return standardise(
        batch.outcome,
        response_pools(batch, "combined", spans_batch=False, takes_part=batch.table.is_live),
        ddof=config.std_ddof,
        eps=config.std_eps,
        divides_by_std=divides_by_std,
        rounding=REWARD_ROUNDING,
    )
