"""GTPO: the reward of each token is shaped by its entropy (arXiv 2508.04349).

[I n] are the equations of version 6, [S n] those of version 1. The objective [I 7] is ``losses.clipped_surrogate``.
"""

import torch
from torch import Tensor

from gtpo_megatron.algorithms.credit.comparison import compare
from gtpo_megatron.algorithms.credit.credit_batch import CreditBatch, Shares, TokenCredit
from gtpo_megatron.algorithms.credit.entropy_weights import clipped_and_floored, shaping_weights
from gtpo_megatron.algorithms.credit.formulations import SINGLE_POOL, shaped_reward
from gtpo_megatron.algorithms.credit.relative import relative_weight
from gtpo_megatron.algorithms.credit.standardise import pools, standardise
from gtpo_megatron.algorithms.exact_sum import combine_by_key_
from gtpo_megatron.config.algorithm import GTPOConfig


def gtpo_credit(config: GTPOConfig, batch: CreditBatch) -> TokenCredit:
    """Shaped rewards [I 3-4] and advantages [I 5-6] of this rank's ``N`` tokens.

    With the defaults, for a token ``t`` of response ``i`` that is correct (O+) or incorrect (O-):

    - ``x[i,t] = H[i,t] / sum_{k in O+} H[k,t] * d_t``, ``d_t`` being the number of correct responses that reach ``t``;
    - ``y[i,t] = (1/H[i,t]) / sum_{k in O-} (1/H[k,t]) * h_t``;
    - ``r+ = alpha1 + alpha2 x`` [I 3], ``r- = -alpha1 - alpha2 y`` [I 4];
    - ``A+ = (r+ - mean(R+)) / std(R+)`` [I 5], ``A- = (r- - mean(R-)) / std(R-)`` [I 6].

    Collectives: those of ``exact_sum``, for the groups that several ranks hold and for the pools.
    """
    shares = _shares(config, batch)  # x on O+, y on O-

    reward = shaped_reward(  # r+ [I 3; S 2, 11, 13] and r- [I 4; S 13]
        config.formulation,
        shares.is_correct,
        shares.values,
        base=config.alpha1,
        bonus=config.alpha2,
        kappa=config.kappa,
    )
    penalties = batch.penalties[batch.table.mine].to(reward.device)
    combine_by_key_(reward, Tensor.add_, penalties, batch.tokens.row)  # R(i) [S 11; I App. D]

    pooled = pools(  # R+, R-, without one-sided groups
        batch.table,
        batch.table.lengths,
        "combined" if config.formulation in SINGLE_POOL else config.advantage_pool,
        spans_batch=config.advantage_scope == "batch",
        takes_part=batch.takes_part(config.one_sided_groups),
    )
    advantage = standardise(  # A+ [I 5; S 3, 14] and A- [I 6; S 14]
        reward,
        batch.on_tokens(pooled.index),
        pooled,
        ddof=config.std_ddof,
        eps=config.std_eps,
        reduction=batch.reduction,
    )
    return TokenCredit(shaped_rewards=reward, advantages=advantage, shares=shares)


def _shares(config: GTPOConfig, batch: CreditBatch) -> Shares:
    """``x`` of the tokens of O+, ``y`` of those of O-; ``t`` counts the policy's own tokens."""
    is_correct = batch.on_tokens(batch.table.is_correct)  # O+
    peers = compare(  # key: (O+ or O- of the group, t); count: d_t, h_t
        batch.tokens,
        batch.table,
        config.entropy_axis,
        spans_batch=config.entropy_scope == "batch",
        compared=batch.compared,
        reduction=batch.reduction,
    )
    weight = clipped_and_floored(shaping_weights(config, batch), config)  # H
    weight = torch.where(is_correct, weight, 1.0 / weight)  # H on O+, 1/H on O-
    # the weight relative to the mean of its peers: / sum * d_t
    share = relative_weight(weight, peers, config.entropy_mean, compared=batch.compared, reduction=batch.reduction)
    if config.shaped_sides != "both":
        share = torch.where(is_correct == (config.shaped_sides == "positive"), share, 1.0)

    is_lone = (peers.count == 1).index_select(0, peers.key)
    if batch.compared is not None:
        is_lone &= batch.compared
    return Shares(values=share, is_correct=is_correct, is_lone=is_lone, reduction=batch.reduction)
