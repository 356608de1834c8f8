"""Metrics of a step's scores: of the policy itself, beside the sampler, the reference policy and the teacher."""

from gtpo_megatron.algorithms.losses.loss_batch import log_ratio
from gtpo_megatron.algorithms.losses.reference_kl import kl_estimate
from gtpo_megatron.batch import ScoredBatch
from gtpo_megatron.mismatch.statistics import gap_metrics
from gtpo_megatron.observability.metrics import Mean, Metric


def score_metrics(batch: ScoredBatch) -> dict[str, Metric]:
    """Log-prob gap and entropy over the tokens that the policy wrote; of one data-parallel rank."""
    mask = batch.rollouts.loss_mask
    return gap_metrics(batch.old_logprobs[mask], batch.rollouts.rollout_logprobs[mask]) | entropy_metrics(batch)


def entropy_metrics(batch: ScoredBatch) -> dict[str, Metric]:
    """Mean entropy in nats; if there are a reference policy and a teacher, the divergence from each.

    From the reference it is the mean of ``k3``, from the teacher that of ``k1``, by which the student is taught.
    """
    mask = batch.rollouts.loss_mask
    values = {"policy/entropy_nats": batch.token_entropy[mask].double()}
    if batch.ref_logprobs is not None:
        differences = log_ratio(batch.old_logprobs.double(), batch.ref_logprobs.double(), mask)
        values["policy/kl_ref_nats"] = kl_estimate(differences, "k3")[mask]
    if batch.teacher_logprobs is not None:
        values["policy/kl_teacher_nats"] = (batch.old_logprobs.double() - batch.teacher_logprobs.double())[mask]
    return {name: Mean(float(value.sum()), value.numel()) for name, value in values.items()}
