"""Is the sampler's policy the trainer's? Asked of every batch, before anything that it taught is used."""

import math

from gtpo_megatron.errors import WeightSyncError
from gtpo_megatron.observability.metrics import to_scalars
from gtpo_megatron.orchestration.parts import Metrics, RolloutHandle


def check_version(rollouts: RolloutHandle, *, version: int) -> None:
    """Raises WeightSyncError unless the responses come from the trainer's weights, ``version``."""
    if rollouts.policy_version != version:
        raise WeightSyncError(
            f"the responses come from policy version {rollouts.policy_version}, the trainer has version {version}"
        )


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
