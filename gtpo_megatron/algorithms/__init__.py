"""The algorithms: pure maths on tensors, and the facades that choose it by the type of the configuration."""

from gtpo_megatron.algorithms.algorithm import Algorithm
from gtpo_megatron.algorithms.assign_credit import Credit, assign_credit
from gtpo_megatron.algorithms.batch.informative import informative_groups
from gtpo_megatron.algorithms.credit.credit_batch import CreditBatch, TokenCredit
from gtpo_megatron.algorithms.exact_sum import exact_sum
from gtpo_megatron.algorithms.losses.denominators import Denominator
from gtpo_megatron.algorithms.losses.loss_inputs import LossInputs
from gtpo_megatron.algorithms.losses.loss_terms import BatchTerms, LossTerms, SumCount
from gtpo_megatron.algorithms.policy_loss import policy_loss
from gtpo_megatron.algorithms.prepare_update import UpdateTensors, prepare_update

__all__ = [
    "Algorithm",
    "BatchTerms",
    "Credit",
    "CreditBatch",
    "Denominator",
    "LossInputs",
    "LossTerms",
    "SumCount",
    "TokenCredit",
    "UpdateTensors",
    "assign_credit",
    "exact_sum",
    "informative_groups",
    "policy_loss",
    "prepare_update",
]
