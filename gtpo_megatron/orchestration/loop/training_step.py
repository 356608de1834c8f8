"""One training step: the nine stages of the path of data."""

from dataclasses import dataclass

from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.data.sharding import updates_of_step
from gtpo_megatron.observability.metrics import Max, Sum
from gtpo_megatron.orchestration.loop.pipeline import RolloutPipeline
from gtpo_megatron.orchestration.loop.policy_check import MismatchCheck, check_version, without_gap
from gtpo_megatron.orchestration.loop.sampling import SampledStep
from gtpo_megatron.orchestration.stages.stages import Stages
from gtpo_megatron.orchestration.stages.trainer import Metrics


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """The result of a step."""

    sampled: SampledStep
    metrics: Metrics


def training_step(
    pipeline: RolloutPipeline, stages: Stages, config: RunConfig, mismatch: MismatchCheck, *, step: int
) -> StepReport:
    """Samples, grades, scores, assigns credit, updates and pushes.

    What the trainer's stages return are metrics; the data is the ranks' own, in ``MegatronActor.batch``.

    Args:
        pipeline: (1) prompts, (2) rollout and (3) reward, of this step or ahead of it.
        stages: the stages.
        config: the run's configuration.
        mismatch: stops the run if sampler and trainer differ.
        step: number of this step, from 1; the trainer starts with policy version ``step - 1`` and pushes ``step``.
    """
    stage = stages.timers.stage
    sampled = pipeline.take(step)
    staleness = check_version(sampled.rollouts, version=step - 1, max_staleness=config.rollout.max_staleness)
    has_scoring_pass = config.rollout.entropy_source == "actor"
    mini_batches = updates_of_step(config, sampled.rollouts.prompt_groups, step=step)
    stages.memory_sharing.to_trainer()
    with stage("score"):  # (4) old log-probs and entropies, by the trainer or by the sampler
        score = stages.trainer.score_tokens if has_scoring_pass else stages.trainer.use_sampler_scores
        score_metrics = score(sampled.rollouts, updates=mini_batches)
    if has_scoring_pass and staleness == 0:  # otherwise sampler and trainer are expected to differ
        score_metrics |= mismatch.check(score_metrics, sampled.rollouts, version=step - 1)
    with stage("credit"):  # (5) shaped rewards, (6) advantages
        credit_metrics = stages.trainer.credit_tokens(sampled.rewards)
    with stage("update"):  # (7) loss, (8) optimizer
        update_metrics = stages.trainer.update(step=step)
    if not has_scoring_pass:  # only the update's forward pass has the trainer's log-probs
        update_metrics |= mismatch.check(update_metrics, sampled.rollouts, version=step - 1)
    pipeline.before_push()
    stages.memory_sharing.to_push()
    with stage("weight_sync"):  # (9) the same weights inside vLLM, verified
        stages.weight_sync.push(version=step)
    stages.memory_sharing.to_engine()
    pipeline.after_push(step)
    own: Metrics = {
        "rollout/staleness_count": Max(staleness),
        "rollout/trained_tokens_count": Sum(int(sampled.rollouts.own_lengths.sum())),
    }
    metrics = sampled.metrics | without_gap(score_metrics, staleness) | credit_metrics | update_metrics
    return StepReport(sampled=sampled, metrics=metrics | own)
