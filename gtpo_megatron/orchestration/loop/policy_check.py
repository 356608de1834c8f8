"""Is the sampler's policy the trainer's? Asked of every batch, before anything that it taught is used."""

import math

from gtpo_megatron.errors import WeightSyncError
from gtpo_megatron.observability.metrics import to_scalars
from gtpo_megatron.orchestration.stages.protocols import Metrics, RolloutHandle


def check_version(rollouts: RolloutHandle, *, version: int, max_staleness: int = 0) -> int:
    """How many pushes behind the trainer's weights, ``version``, the responses are.

    Raises:
        WeightSyncError: more than ``max_staleness``, or ahead of them.
    """
    staleness = version - rollouts.policy_version
    if not 0 <= staleness <= max_staleness:
        allowed = "exactly that" if max_staleness == 0 else f"that or up to {max_staleness} older"
        raise WeightSyncError(
            f"the responses come from policy version {rollouts.policy_version}, the trainer has version {version}; "
            f"expected {allowed}"
        )
    return staleness


def without_gap(score_metrics: Metrics, staleness: int) -> Metrics:
    """Scores of stale responses say nothing of the push: their gap is the policy's own way since."""
    if staleness == 0:
        return score_metrics
    return {name: metric for name, metric in score_metrics.items() if not name.startswith("sync/logprob_gap")}


def check_gap(metrics: Metrics, *, version: int, limit: float) -> None:
    """Compares log-probs of the sampled tokens on both sides.

    Args:
        metrics: hold the largest gap: of the scoring pass, or of the update where there is none.
        version: of the weights on both sides.
        limit: nats.

    Raises:
        WeightSyncError: a gap beyond the limit.
    """
    gap = to_scalars(metrics)["sync/logprob_gap_max"]
    if math.isnan(gap) or gap > limit:
        raise WeightSyncError(
            f"policy version {version}: sampler and trainer differ by up to {gap:.3g} nats on a token, more than "
            f"weight_sync.logprob_gap_limit={limit:g}; either the push went wrong, or the limit is too tight for "
            f"the dtypes in use (float32: some 1e-5, bfloat16: up to about 1)"
        )
