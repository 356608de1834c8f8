"""The algorithms: pure maths on tensors, and the facades that choose it by the type of the configuration."""

from gtpo_megatron.algorithms.credit import Credit, assign_credit
from gtpo_megatron.algorithms.informative import informative_groups
from gtpo_megatron.algorithms.loss_terms import BatchTerms, LossTerms, SumCount
from gtpo_megatron.algorithms.policy_loss import policy_loss
from gtpo_megatron.algorithms.update import UpdateTensors, prepare_update

__all__ = [
    "BatchTerms",
    "Credit",
    "LossTerms",
    "SumCount",
    "UpdateTensors",
    "assign_credit",
    "informative_groups",
    "policy_loss",
    "prepare_update",
]
