"""Entropy as a bonus on GRPO's advantage (arXiv 2506.14758)."""

from dataclasses import replace

import torch

from gtpo_megatron.algorithms.credit.group_relative import group_relative_credit
from gtpo_megatron.algorithms.token_batch import CreditBatch
from gtpo_megatron.batch import Credit
from gtpo_megatron.config.algorithm import EntropyAdvantageConfig


def entropy_advantage_credit(config: EntropyAdvantageConfig, batch: CreditBatch) -> Credit:
    """``A + min(coefficient * H, |A| / bound)`` (arXiv 2506.14758, Eq. 6-7), ``A`` being GRPO's.

    ``coefficient`` is ``alpha`` there, ``bound`` is ``kappa``: above 1 no sign can flip.
    """
    credit = group_relative_credit(config, batch)
    bonus = torch.minimum(config.coefficient * batch.entropy.clamp(min=0.0), credit.advantages.abs() / config.bound)
    return replace(credit, advantages=credit.advantages + bonus)
