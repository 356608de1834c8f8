"""Is the sampler's policy the trainer's? Asked of every batch, before anything is learned from it."""

import math

from gtpo_megatron.errors import WeightSyncError
from gtpo_megatron.observability.metrics import to_scalars
from gtpo_megatron.orchestration.parts import Metrics, RolloutHandle


def check_same_policy(rollouts: RolloutHandle, score_metrics: Metrics, *, version: int, gap_limit: float) -> None:
    """Compares versions, then log-probs of the sampled tokens on both sides.

    Args:
        rollouts: say which version generated them.
        score_metrics: hold the largest gap.
        version: of the trainer's weights.
        gap_limit: nats.

    Raises:
        WeightSyncError: another version, or a gap beyond the limit.
    """
    if rollouts.policy_version != version:
        raise WeightSyncError(
            f"the responses come from policy version {rollouts.policy_version}, the trainer has version {version}"
        )
    gap = to_scalars(score_metrics)["sync/logprob_gap_max"]
    if math.isnan(gap) or gap > gap_limit:
        raise WeightSyncError(
            f"policy version {version}: sampler and trainer differ by up to {gap:.3g} nats on a token, more than "
            f"weight_sync.logprob_gap_limit={gap_limit:g}; either the push went wrong, or the limit is too tight for "
            f"the dtypes in use (float32: some 1e-5, bfloat16: up to about 1)"
        )
