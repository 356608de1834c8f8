"""One training step: the nine stages of the path of data, in one screenful."""

from dataclasses import dataclass

from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.orchestration.parts import Metrics, RankHandle, StepParts
from gtpo_megatron.orchestration.policy_check import check_gap, check_version
from gtpo_megatron.orchestration.sampling import DrawPrompts, Sampled, sample_groups


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """What a step leaves to be looked at."""

    sampled: Sampled
    batch: RankHandle
    metrics: Metrics


def training_step(draw: DrawPrompts, parts: StepParts, config: RunConfig, *, step: int) -> StepReport:
    """Samples, judges, scores, assigns credit, updates and pushes.

    Args:
        draw: (1) hands out prompts.
        parts: who does it.
        config: of the run.
        step: number of this step, from 1; responses come from policy version ``step - 1``, version ``step`` is pushed.
    """
    stage = parts.timers.stage
    sampled = sample_groups(  # (2) rollout and (3) reward, again where dynamic sampling asks for it
        draw, parts, config.rollout, config.algorithm, num_prompts=config.data.prompts_per_step, seed=config.seed
    )
    check_version(sampled.rollouts, version=step - 1)
    has_scoring_pass = config.rollout.entropy_source == "actor"
    with stage("score"):  # (4) old log-probs and entropies, by the trainer or as the sampler saw them
        scores = (parts.actor.score_tokens if has_scoring_pass else parts.actor.adopt_scores)(sampled.rollouts)
    if has_scoring_pass:
        check_gap(scores.metrics, version=step - 1, limit=parts.logprob_gap_limit)
    with stage("credit"):  # (5) shaped rewards, (6) advantages
        batch = parts.actor.assign_credit(scores, sampled.rewards)
    with stage("update"):  # (7) loss, (8) optimizer
        updates = parts.actor.update(batch, step=step)
    if not has_scoring_pass:  # the update's forward pass was the first to see the trainer's log-probs
        check_gap(updates, version=step - 1, limit=parts.logprob_gap_limit)
    with stage("weight_sync"):  # (9) the same weights inside vLLM, verified
        parts.weight_sync.push(version=step)
    return StepReport(sampled=sampled, batch=batch, metrics=sampled.metrics | scores.metrics | batch.metrics | updates)
