"""Advantages relative to the response's group: GRPO (arXiv 2402.03300), and Dr.GRPO's without the std (2503.20783)."""

import torch

from gtpo_megatron.algorithms.batch.reduction import LocalReduction
from gtpo_megatron.algorithms.credit.credit_batch import CreditBatch, TokenCredit
from gtpo_megatron.algorithms.credit.standardise import pools, standardise
from gtpo_megatron.config.algorithm import AlgorithmConfig, DrGRPOConfig


def group_relative_credit(config: AlgorithmConfig, batch: CreditBatch) -> TokenCredit:
    """``A_i = (r_i - mean(r)) / (std(r) + eps)`` over the responses of the group, ``r`` with the length penalty.

    0 in groups of one and in groups of equal rewards. Dr.GRPO leaves ``A_i = r_i - mean(r)``.
    """
    table = batch.table
    reward = batch.outcome
    pooled = pools(table, table.is_live.to(torch.int64), "combined", spans_batch=False, takes_part=table.is_live)
    advantage = standardise(
        reward,
        pooled.of_response[table.is_live],
        pooled,
        ddof=config.std_ddof,
        eps=config.std_eps,
        reduction=LocalReduction(),
        divides_by_std=not isinstance(config, DrGRPOConfig),
    )
    return batch.of_responses(reward, advantage)
