"""The algorithms: pure maths on tensors, and the facades that choose it by the type of the configuration."""

from gtpo_megatron.algorithms.assign_credit import assign_credit
from gtpo_megatron.algorithms.credit.gtpo import peer_sets
from gtpo_megatron.algorithms.credit.shaping import entropy_weights, shaped_reward, shaping_entropy
from gtpo_megatron.algorithms.credit.standardise import response_pools, standardise, token_pools
from gtpo_megatron.algorithms.losses.clipped_surrogate import token_surrogate
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
    "entropy_weights",
    "exact_sum",
    "informative_groups",
    "peer_sets",
    "policy_loss",
    "prepare_update",
    "response_pools",
    "shaped_reward",
    "shaping_entropy",
    "standardise",
    "token_pools",
    "token_surrogate",
    "update_loss",
]
