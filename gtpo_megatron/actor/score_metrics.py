"""What the trainer's scores say of the sampler: how far apart both are on the tokens that were sampled."""

from gtpo_megatron.batch import PolicyScores, RolloutBatch
from gtpo_megatron.observability.metrics import Max, Mean, Metric


def score_metrics(rollouts: RolloutBatch, scores: PolicyScores) -> dict[str, Metric]:
    """Absolute log-prob gap in nats, and the entropy over all response tokens; of one data-parallel rank."""
    mask = rollouts.response_mask
    gap = (scores.old_logprobs - rollouts.rollout_logprobs).abs()[mask].double()
    count = int(mask.sum())
    return {
        "sync/logprob_gap_max": Max(float(gap.max()) if count else 0.0),
        "sync/logprob_gap_mean": Mean(float(gap.sum()), count),
        "policy/entropy_nats": Mean(float(scores.token_entropy[mask].double().sum()), count),
    }
