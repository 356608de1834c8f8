"""The algorithms: pure maths on tensors, and the facades that choose it by the type of the configuration."""

from gtpo_megatron.algorithms.assign_credit import assign_credit
from gtpo_megatron.algorithms.losses.denominators import Denominator
from gtpo_megatron.algorithms.losses.loss_batch import LossInputs, LossTerms, SumCount, UpdateBatch
from gtpo_megatron.algorithms.policy_loss import policy_loss, update_loss
from gtpo_megatron.algorithms.prepare_update import prepare_update
from gtpo_megatron.algorithms.registry import Algorithm
from gtpo_megatron.algorithms.sums import exact_sum
from gtpo_megatron.algorithms.token_batch import CreditBatch
from gtpo_megatron.batch import Credit
from gtpo_megatron.outcomes import informative_groups

__all__ = [
    "Algorithm",
    "Credit",
    "CreditBatch",
    "Denominator",
    "LossInputs",
    "LossTerms",
    "SumCount",
    "UpdateBatch",
    "assign_credit",
    "exact_sum",
    "informative_groups",
    "policy_loss",
    "prepare_update",
    "update_loss",
]
