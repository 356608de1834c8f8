"""(1)(2)(3) Samples the responses of a step, repeatedly with DAPO's dynamic sampling."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from gtpo_megatron.batch import PromptBatch, RewardBatch
from gtpo_megatron.config.algorithm import AlgorithmConfig
from gtpo_megatron.config.rollout import RolloutConfig
from gtpo_megatron.errors import RolloutError
from gtpo_megatron.observability.metrics import Mean, Sum, merge
from gtpo_megatron.orchestration.loop.rollout_metrics import best_rewards, rollout_metrics
from gtpo_megatron.orchestration.stages.rollouts import RolloutHandle, joined
from gtpo_megatron.orchestration.stages.stages import Stages
from gtpo_megatron.orchestration.stages.trainer import Metrics
from gtpo_megatron.outcomes import informative_groups, solved_counts

logger = logging.getLogger(__name__)

DrawPrompts = Callable[[int], PromptBatch]
"""Draws this many prompts, each with a group label that is unique in the run."""

NoteOutcomes = Callable[[dict[str, tuple[int, int]]], None]
"""Is told of every problem that was sampled, by its id: correct responses, and those with a verdict."""


def no_note(_: dict[str, tuple[int, int]]) -> None:
    """A ``NoteOutcomes`` for whoever draws without a pool."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledStep:
    """The responses of a step.

    Attributes:
        prompts: their prompts.
        rollouts: the responses.
        rewards: one per response.
        metrics: metrics of all sampled responses, including dropped ones.
        seconds: seconds by stage, if they were sampled in another thread.
    """

    prompts: PromptBatch
    rollouts: RolloutHandle
    rewards: RewardBatch
    metrics: Metrics
    seconds: dict[str, float] = field(default_factory=dict)


def check_has_verdicts(rewards: RewardBatch) -> None:
    """Raises RolloutError with the most frequent reason if no response has a verdict."""
    if bool(rewards.failed.all()):
        why = rewards.commonest_failure or "log.txt says what it raised"
        raise RolloutError(f"the reward function has no verdict on any of {len(rewards.failed)} responses; {why}")


def sample_groups(
    draw: DrawPrompts,
    stages: Stages,
    rollout: RolloutConfig,
    algorithm: AlgorithmConfig,
    *,
    num_prompts: int,
    seed: int,
    note: NoteOutcomes = no_note,
) -> SampledStep:
    """Samples and grades ``num_prompts`` groups.

    With dynamic sampling, groups from which nothing can be learnt are dropped and replaced by new
    prompts, at most ``max_refills`` times; the step then uses the groups it has. A refill draws as many prompts as are
    expected to be enough, since each round takes as long as its longest response. The first ``num_prompts`` groups in
    the order of drawing are taken, whichever were fastest.

    Raises:
        RolloutError: dynamic sampling found no informative group, or no response has a verdict.
    """
    rounds = [_one_round(draw(num_prompts), stages, rollout, seed)]
    check_has_verdicts(rounds[0].rewards)
    kept = [informative(rounds[0], algorithm)]
    if not algorithm.dynamic_sampling.enabled:
        note(outcomes(rounds[0], algorithm))
        taught = {"rollout/groups_taught_frac": Mean(float(len(kept[0])), num_prompts)}
        return replace(rounds[0], metrics=rounds[0].metrics | taught)
    limit = algorithm.dynamic_sampling.max_refills
    while (missing := num_prompts - sum(len(groups) for groups in kept)) > 0 and len(rounds) <= limit:
        num_drawn = sum(len(sampled.prompts.problems) for sampled in rounds)
        refill = refill_size(missing, num_kept=num_prompts - missing, num_drawn=num_drawn, num_prompts=num_prompts)
        rounds.append(_one_round(draw(refill), stages, rollout, seed))
        kept.append(informative(rounds[-1], algorithm))
    for sampled in rounds:  # not before: where an engine dies, all rounds are sampled again
        note(outcomes(sampled, algorithm))
    num_kept = sum(len(groups) for groups in kept)
    num_drawn = sum(len(sampled.prompts.problems) for sampled in rounds)
    if num_kept == 0:
        raise RolloutError(
            f"dynamic sampling: none of {num_drawn} groups in {len(rounds)} rounds has "
            f"{algorithm.dynamic_sampling.rule}; the prompts are all too easy or too hard for this model: change the "
            f"data, or raise group_size"
        )
    if num_kept < num_prompts:
        logger.warning(
            "dynamic sampling gave up after %d refills: %d of %d groups, from %d drawn; raise "
            "algorithm.dynamic_sampling.max_refills, or use easier or harder prompts",
            len(rounds) - 1,
            num_kept,
            num_prompts,
            num_drawn,
        )
    best = best_rewards([sampled.rewards for sampled in rounds])
    metrics = (
        merge([sampled.metrics for sampled in rounds])
        | best
        | {
            "rollout/groups_taught_frac": Mean(float(min(num_kept, num_prompts)), num_drawn),
            "rollout/refills_count": Sum(len(rounds) - 1),
            "rollout/groups_dropped_count": Sum(num_drawn - num_kept),
            "rollout/groups_surplus_count": Sum(max(0, num_kept - num_prompts)),
        }
    )
    drawn = [group for sampled in rounds for group in sampled.prompts.group_ids]
    usable = set().union(*kept)
    taken = set([group for group in drawn if group in usable][:num_prompts])
    return merged(rounds, [groups & taken for groups in kept], metrics)


def refill_size(num_missing: int, *, num_kept: int, num_drawn: int, num_prompts: int) -> int:
    """Prompts of a refill: as many as give the missing groups at the rate of all rounds so far.

    Args:
        num_missing: groups that the step lacks, at least 1.
        num_kept: groups that were kept so far.
        num_drawn: prompts that were drawn so far.
        num_prompts: prompts of a step; also the most that a refill draws, and what it draws if none was kept so far.
    """
    return num_prompts if num_kept == 0 else min(num_prompts, math.ceil(num_missing * num_drawn / num_kept))


def _one_round(prompts: PromptBatch, stages: Stages, config: RolloutConfig, seed: int) -> SampledStep:
    with stages.timers.stage("rollout"):  # (2)
        rollouts = stages.engine.generate(prompts, config.sampling, samples_per_prompt=config.group_size, seed=seed)
    with stages.timers.stage("reward"):  # (3)
        rewards = stages.grade(rollouts, prompts)
    return SampledStep(prompts=prompts, rollouts=rollouts, rewards=rewards, metrics=rollout_metrics(rollouts, rewards))


def informative(sampled: SampledStep, algorithm: AlgorithmConfig) -> set[int]:
    """Labels of the groups that dynamic sampling keeps."""
    rewards, rule = sampled.rewards, algorithm.dynamic_sampling
    labels, is_informative = informative_groups(
        rewards.rewards,
        sampled.rollouts.group_ids,
        success_threshold=algorithm.success_threshold,
        is_usable=_counts(sampled),
        min_spread=rule.min_spread if rule.keep == "spread" else None,
        mean_between=rule.mean_between,
    )
    return set(labels[is_informative].tolist())


def outcomes(sampled: SampledStep, algorithm: AlgorithmConfig) -> dict[str, tuple[int, int]]:
    """By the id of a problem: its correct responses, and those with a verdict."""
    threshold = algorithm.success_threshold
    counts = solved_counts(
        sampled.rewards.rewards, sampled.rollouts.group_ids, success_threshold=threshold, is_usable=_counts(sampled)
    )
    found: dict[str, tuple[int, int]] = {}
    for label, problem in zip(sampled.prompts.group_ids, sampled.prompts.problems, strict=True):
        if label in counts:  # with a pool a problem may be in a step twice, where an epoch ends
            before = found.get(problem.problem_id, (0, 0))
            found[problem.problem_id] = before[0] + counts[label][0], before[1] + counts[label][1]
    return found


def _counts(sampled: SampledStep) -> Tensor:
    """``[B]`` bool: whether a response has a verdict and tokens."""
    return ~sampled.rewards.failed & (sampled.rollouts.own_lengths > 0)


def merged(
    rounds: Sequence[SampledStep], kept: Sequence[set[int]], metrics: Metrics, *, max_spread: int = 0
) -> SampledStep:
    """The kept groups of all rounds, in the order they were drawn.

    Args:
        rounds: results of the rounds, at least one.
        kept: labels of the groups to keep, of each round.
        metrics: metrics of the result.
        max_spread: largest difference allowed between policy versions.
    """
    rows = [
        [row for row, group in enumerate(sampled.rollouts.group_ids.tolist()) if group in groups]
        for sampled, groups in zip(rounds, kept, strict=True)
    ]
    pairs = [
        (group, problem)
        for sampled, groups in zip(rounds, kept, strict=True)
        for group, problem in zip(sampled.prompts.group_ids, sampled.prompts.problems, strict=True)
        if group in groups
    ]
    return SampledStep(
        prompts=PromptBatch(
            problems=tuple(problem for _, problem in pairs), group_ids=tuple(group for group, _ in pairs)
        ),
        rollouts=joined(
            [sampled.rollouts.select(part) for sampled, part in zip(rounds, rows, strict=True)], max_spread=max_spread
        ),
        rewards=RewardBatch.joined([s.rewards.select(part) for s, part in zip(rounds, rows, strict=True)]),
        metrics=metrics,
    )
