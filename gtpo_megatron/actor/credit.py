"""(5)(6) Credit of a rank's responses: what ``assign_credit`` needs of a batch, and which tokens take part."""

import torch

from gtpo_megatron.algorithms import assign_credit
from gtpo_megatron.algorithms.sums import Reduction
from gtpo_megatron.batch import RewardBatch, ScoredBatch, TrainBatch, fields_of
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.data.shaped_tokens import ShapedTokens
from gtpo_megatron.errors import DataError
from gtpo_megatron.observability.metrics import Max, Mean, Metric


def credit_batch(
    config: RunConfig,
    batch: ScoredBatch,
    rewards: RewardBatch,
    *,
    shaped_tokens: ShapedTokens | None,
    reduction: Reduction,
) -> tuple[TrainBatch, dict[str, Metric]]:
    """Shaped rewards and advantages of this rank's responses, equal however the responses were sharded.

    A response without a verdict takes no part: it is in no set, in no pool and in no loss.

    Args:
        config: configuration of the run.
        batch: this rank's responses.
        rewards: rewards of all responses of the step.
        shaped_tokens: finds the tokens whose rewards are shaped; None if all are.
        reduction: sums over the ranks that hold other responses.

    Raises:
        DataError: the responses were scored under other weights than sampled them (beyond what the configuration
            allows and corrects for): their entropies are not those of the policy that made the choices.

    Collectives: those of ``reduction``.
    """
    staleness = batch.scored_version - batch.policy_version
    if not 0 <= staleness <= config.rollout.max_staleness:
        raise DataError(
            f"responses of policy version {batch.policy_version} were scored under version {batch.scored_version}; "
            f"rollout.max_staleness={config.rollout.max_staleness} allows at most so many versions between them"
        )
    mine, index = batch.rollouts, torch.tensor(batch.global_rows, dtype=torch.int64)
    judged = mine.loss_mask & ~rewards.failed[index][:, None]
    mask = None
    if shaped_tokens is not None:
        mask = shaped_tokens.mask(mine)
    credit = assign_credit(
        config.algorithm,
        rewards=rewards.rewards[index],
        token_entropy=batch.token_entropy,
        response_mask=judged,
        group_ids=mine.group_ids,
        old_logprobs=batch.old_logprobs,
        ref_logprobs=batch.ref_logprobs,
        teacher_logprobs=batch.teacher_logprobs,
        shaped_tokens=mask,
        # of no rank or of all, whether it has such a response or not
        branches=(mine.branches or [()] * mine.num_responses) if config.environment.name else None,
        turn_rewards=[rewards.turn_rewards[row] for row in batch.global_rows] if rewards.turn_rewards else None,
        truncated=mine.truncated,
        reduction=reduction,
    )
    metrics: dict[str, Metric] = {name: Max(value) for name, value in credit.metrics.items()}
    if mask is not None:
        left_out = float((judged & ~mask).sum())
        metrics["credit/unshaped_tokens_frac"] = Mean(left_out, float(judged.sum()))
    train_batch = TrainBatch(
        **fields_of(batch),
        shaped_rewards=credit.shaped_rewards,
        advantages=credit.advantages,
        loss_mask=judged & ~mine.truncated[:, None] if config.update.mask_truncated else judged,
    )
    return train_batch, metrics
