"""Advantages relative to the response's group: GRPO (arXiv 2402.03300), and Dr.GRPO's without the std (2503.20783)."""

import torch
from torch import Tensor

from gtpo_megatron.algorithms.batch.reduction import LocalReduction
from gtpo_megatron.algorithms.credit.credit_batch import CreditBatch, Shares, TokenCredit
from gtpo_megatron.algorithms.credit.standardise import pools, standardise
from gtpo_megatron.config.algorithm import AlgorithmConfig, DrGRPOConfig


def group_relative_credit(config: AlgorithmConfig, batch: CreditBatch) -> TokenCredit:
    """``A_i = (r_i - mean(r)) / (std(r) + eps)`` over the responses of the group, ``r`` with the length penalty.

    0 in groups of one and in groups of equal rewards. Dr.GRPO leaves ``A_i = r_i - mean(r)``.
    """
    table = batch.table
    reward = (table.rewards + batch.penalties)[table.is_live]
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
    return on_responses(batch, reward, advantage)


def on_responses(batch: CreditBatch, reward: Tensor, advantage: Tensor, shares: Shares | None = None) -> TokenCredit:
    """Credit of whole responses, repeated on their tokens.

    Args:
        batch: what the credit function was given.
        reward: ``[L]`` float64, of the responses with tokens, in the order of the table.
        advantage: ``[L]`` float64.
        shares: what shaped the rewards, if anything did.
    """
    everyone = torch.zeros(2, len(batch.table.lengths), dtype=torch.float64)
    everyone[:, batch.table.is_live] = torch.stack((reward, advantage))
    return TokenCredit(
        shaped_rewards=batch.on_tokens(everyone[0]), advantages=batch.on_tokens(everyone[1]), shares=shares
    )
