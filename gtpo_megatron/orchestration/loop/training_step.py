"""One training step: the nine stages of the path of data, in one screenful."""

from dataclasses import dataclass

from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.observability.metrics import Max
from gtpo_megatron.orchestration.loop.pipeline import RolloutPipeline
from gtpo_megatron.orchestration.loop.policy_check import check_gap, check_version, without_gap
from gtpo_megatron.orchestration.loop.sampling import Sampled
from gtpo_megatron.orchestration.stages.protocols import Metrics, StepParts


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """What a step leaves to be looked at."""

    sampled: Sampled
    metrics: Metrics


def training_step(pipeline: RolloutPipeline, parts: StepParts, config: RunConfig, *, step: int) -> StepReport:
    """Samples, judges, scores, assigns credit, updates and pushes.

    Args:
        pipeline: (1) prompts, (2) rollout and (3) reward, of this step or ahead of it.
        parts: who does it.
        config: of the run.
        step: number of this step, from 1; the trainer starts with policy version ``step - 1`` and pushes ``step``.
    """
    stage = parts.timers.stage
    sampled = pipeline.take(step)
    staleness = check_version(sampled.rollouts, version=step - 1, max_staleness=config.rollout.max_staleness)
    has_scoring_pass = config.rollout.entropy_source == "actor"
    parts.turns.to_trainer()
    with stage("score"):  # (4) old log-probs and entropies, by the trainer or as the sampler saw them
        scores = (parts.actor.score_tokens if has_scoring_pass else parts.actor.use_sampler_scores)(sampled.rollouts)
    if has_scoring_pass and staleness == 0:  # else sampler and trainer differ by right
        check_gap(scores, version=step - 1, limit=parts.logprob_gap_limit)
    with stage("credit"):  # (5) shaped rewards, (6) advantages
        credit = parts.actor.assign_credit(sampled.rewards)
    with stage("update"):  # (7) loss, (8) optimizer
        updates = parts.actor.update(step=step)
    if not has_scoring_pass:  # the update's forward pass was the first to see the trainer's log-probs
        check_gap(updates, version=step - 1, limit=parts.logprob_gap_limit)
    pipeline.before_push()
    parts.turns.to_push()
    with stage("weight_sync"):  # (9) the same weights inside vLLM, verified
        parts.weight_sync.push(version=step)
    parts.turns.to_engine()
    pipeline.after_push(step)
    metrics = sampled.metrics | without_gap(scores, staleness) | credit | updates
    return StepReport(sampled=sampled, metrics=metrics | {"rollout/staleness_count": Max(staleness)})
