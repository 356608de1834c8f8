"""RLOO: the baseline of a response is the mean reward of the others (arXiv 2402.14740)."""

import torch

from gtpo_megatron.algorithms.credit.group_relative import group_centred
from gtpo_megatron.algorithms.token_batch import CreditBatch
from gtpo_megatron.batch import Credit
from gtpo_megatron.config.algorithm import RLOOConfig


def rloo_credit(config: RLOOConfig, batch: CreditBatch) -> Credit:
    """``A_i = r_i - sum_{j != i} r_j / (K - 1) = K / (K - 1) (r_i - mean(r))`` over the ``K`` responses of the group.

    0 in groups of one, which have no baseline. ``r`` includes the length penalty.
    """
    table = batch.table
    group = table.group_index[table.is_live]
    size = torch.bincount(group, minlength=table.num_groups).to(torch.float64)
    factor = size / (size - 1).clamp(min=1)
    return batch.of_responses(batch.outcome, factor[group] * group_centred(config, batch))
