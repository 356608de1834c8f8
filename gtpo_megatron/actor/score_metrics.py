"""What the trainer's scores say of the sampler: how far apart both are on the tokens that were sampled."""

from torch import Tensor

from gtpo_megatron.batch import PolicyScores, RolloutBatch
from gtpo_megatron.observability.metrics import Max, Mean, Metric


def score_metrics(rollouts: RolloutBatch, scores: PolicyScores) -> dict[str, Metric]:
    """Log-prob gap and entropy over the tokens that the policy wrote; of one data-parallel rank."""
    mask = rollouts.loss_mask
    return gap_metrics(scores.old_logprobs[mask], rollouts.rollout_logprobs[mask]) | entropy_metrics(rollouts, scores)


def entropy_metrics(rollouts: RolloutBatch, scores: PolicyScores) -> dict[str, Metric]:
    """Mean entropy in nats."""
    values = scores.token_entropy[rollouts.loss_mask].double()
    return {"policy/entropy_nats": Mean(float(values.sum()), values.numel())}


def gap_metrics(logprobs: Tensor, rollout_logprobs: Tensor) -> dict[str, Metric]:
    """Absolute difference in nats between the trainer's and the sampler's log-probs of the same tokens."""
    gap = (logprobs - rollout_logprobs).abs().double()
    return {
        "sync/logprob_gap_max": Max(float(gap.max()) if gap.numel() else 0.0),
        "sync/logprob_gap_mean": Mean(float(gap.sum()), gap.numel()),
    }
