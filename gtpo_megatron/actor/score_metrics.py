"""Metrics of a step's scores: of the policy itself, beside the sampler and beside the reference policy."""

from gtpo_megatron.algorithms.losses.ratios import log_ratio
from gtpo_megatron.algorithms.losses.reference_kl import kl_estimate
from gtpo_megatron.batch import PolicyScores, RolloutBatch
from gtpo_megatron.mismatch.statistics import gap_metrics
from gtpo_megatron.observability.metrics import Mean, Metric


def score_metrics(rollouts: RolloutBatch, scores: PolicyScores) -> dict[str, Metric]:
    """Log-prob gap and entropy over the tokens that the policy wrote; of one data-parallel rank."""
    mask = rollouts.loss_mask
    return gap_metrics(scores.old_logprobs[mask], rollouts.rollout_logprobs[mask]) | entropy_metrics(rollouts, scores)


def entropy_metrics(rollouts: RolloutBatch, scores: PolicyScores) -> dict[str, Metric]:
    """Mean entropy in nats, and mean ``k3`` of the divergence from the reference policy, if there is one."""
    mask = rollouts.loss_mask
    values = {"policy/entropy_nats": scores.token_entropy[mask].double()}
    if scores.ref_logprobs is not None:
        differences = log_ratio(scores.old_logprobs.double(), scores.ref_logprobs.double(), mask)
        values["policy/kl_ref_nats"] = kl_estimate(differences, "k3")[mask]
    return {name: Mean(float(value.sum()), value.numel()) for name, value in values.items()}
