"""One training step: the nine stages of the path of data, in one screenful."""

from dataclasses import dataclass

from gtpo_megatron.batch import PromptBatch, RewardBatch
from gtpo_megatron.config.rollout import RolloutConfig
from gtpo_megatron.orchestration.parts import Metrics, RankHandle, RolloutHandle, StepParts
from gtpo_megatron.orchestration.policy_check import check_same_policy
from gtpo_megatron.orchestration.rollout_metrics import rollout_metrics


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """What a step leaves to be looked at."""

    rollouts: RolloutHandle
    rewards: RewardBatch
    batch: RankHandle
    metrics: Metrics


def training_step(prompts: PromptBatch, parts: StepParts, config: RolloutConfig, *, step: int, seed: int) -> StepReport:
    """Samples, judges, scores, assigns credit, updates and pushes.

    Args:
        prompts: (1) of this step.
        parts: who does it.
        config: of the rollout.
        step: number of this step, from 1; the pushed policy has this version, responses come from version ``step - 1``.
        seed: of the samples.
    """
    stage = parts.timers.stage
    with stage("rollout"):  # (2)
        rollouts = parts.engine.generate(prompts, config.sampling, samples_per_prompt=config.group_size, seed=seed)
    with stage("reward"):  # (3)
        rewards = parts.reward.score(rollouts, prompts)
    with stage("score"):  # (4)
        scores = parts.actor.score_tokens(rollouts)
    check_same_policy(rollouts, scores.metrics, version=step - 1, gap_limit=parts.logprob_gap_limit)
    with stage("credit"):  # (5)(6)
        batch = parts.actor.assign_credit(scores, rewards)
    with stage("update"):  # (7)(8)
        updates = parts.actor.update(batch, step=step)
    with stage("weight_sync"):  # (9)
        parts.weight_sync.push(parts.actor, parts.engine, version=step)
    metrics = rollout_metrics(rollouts, rewards) | scores.metrics | batch.metrics | updates
    return StepReport(rollouts=rollouts, rewards=rewards, batch=batch, metrics=metrics)
