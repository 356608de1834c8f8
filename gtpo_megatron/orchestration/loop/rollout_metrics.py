"""Metrics of a rollout batch, from a few numbers per response."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gtpo_megatron.batch import (
    BRANCHES,
    ENDED_UNGRADED,
    ENVIRONMENT_SECONDS,
    ENVIRONMENT_WAIT,
    REQUESTS_REFUSED,
    REQUESTS_UNENFORCED,
    RewardBatch,
)
from gtpo_megatron.observability.metrics import Max, Mean, Sum
from gtpo_megatron.orchestration.stages.rollouts import RolloutHandle
from gtpo_megatron.orchestration.stages.trainer import Metrics

BEST_COUNTS = (32, 16)
"""Counts of the reward curves of the paper's version 1."""


def rollout_metrics(rollouts: RolloutHandle, rewards: RewardBatch) -> Metrics:
    """Rewards, lengths, and the fraction of mixed groups; responses without a verdict are left out of the rewards.

    Lengths count the tokens that the policy wrote.
    """
    judged = ~rewards.failed
    values = rewards.rewards.double()
    lengths = rollouts.own_lengths
    num = lengths.numel()
    foreign = int((rollouts.response_lengths - lengths).sum())
    best, mixed = _by_group(values, rollouts.group_ids, judged)
    metrics: Metrics = {
        "rollout/reward_mean": Mean(float(values[judged].sum()), int(judged.sum())),
        "rollout/best_of_group_reward_mean": Mean(float(best.sum()), best.numel()),
        "rollout/reward_failed_count": Sum(int(rewards.failed.sum())),
        "rollout/reward_over_budget_count": Sum(rewards.num_over_budget),
        "rollout/groups_mixed_frac": Mean(float(mixed.sum()), mixed.numel()),
        "rollout/response_length_tokens": Mean(int(lengths.sum()), num),
        "rollout/response_length_max_tokens": Max(int(lengths.max()) if num else 0),
        "rollout/responses_count": Sum(num),
        "rollout/response_tokens_count": Sum(int(lengths.sum())),
        "rollout/foreign_tokens_count": Sum(foreign),
        "rollout/truncated_frac": Mean(int(rollouts.truncated.sum()), num),
        "rollout/multi_version_count": Sum(int(rollouts.is_multi_version.sum())),
        "rollout/prompt_tokens": Mean(int(rollouts.prompt_lengths.sum()), num),
    }
    return metrics | _part_means(rewards) | _episode_counts(rewards) | best_rewards([rewards])


def _part_means(rewards: RewardBatch) -> Metrics:
    """The mean of every part of the reward, over the responses that have it; of the wait for environments the most."""
    judged = {name: part[part.isfinite() & ~rewards.failed].double() for name, part in rewards.parts.items()}
    # a time has a name of times, which may differ between two runs of one seed
    found: Metrics = {
        f"timing/{name}" if name == ENVIRONMENT_SECONDS else f"reward/{name}_mean": Mean(float(part.sum()), len(part))
        for name, part in judged.items()
        if len(part) and name not in (ENVIRONMENT_WAIT, REQUESTS_REFUSED, REQUESTS_UNENFORCED, ENDED_UNGRADED, BRANCHES)
    }
    if ENVIRONMENT_WAIT in rewards.parts and rewards.failed.numel():
        # the episode that ended last has all of its engine's; it may be one that hung, without a verdict
        waits = rewards.parts[ENVIRONMENT_WAIT]
        found[f"timing/{ENVIRONMENT_WAIT}"] = Max(float(waits.nan_to_num().max()))
    return found


def _episode_counts(rewards: RewardBatch) -> Metrics:
    """What a reward does not tell: requests that were refused or not enforced, and limits that came before the grading.

    Requests are counted of episodes without a verdict too.
    """
    found: Metrics = {}
    if REQUESTS_REFUSED in rewards.parts:
        refused = rewards.parts[REQUESTS_REFUSED].nan_to_num()
        found["rollout/requests_refused_count"] = Sum(int(refused.sum()))
        found["rollout/responses_refused_count"] = Sum(int((refused > 0).sum()))
    if REQUESTS_UNENFORCED in rewards.parts:
        unenforced = rewards.parts[REQUESTS_UNENFORCED].nan_to_num()
        found["rollout/requests_unenforced_count"] = Sum(int(unenforced.sum()))
    if BRANCHES in rewards.parts:
        found["rollout/branches_count"] = Sum(int(rewards.parts[BRANCHES].nan_to_num().sum()))
    if ENDED_UNGRADED in rewards.parts:
        ungraded = rewards.parts[ENDED_UNGRADED].nan_to_num() * ~rewards.failed
        found["rollout/responses_ungraded_count"] = Sum(int(ungraded.sum()))
    return found


def best_rewards(rounds: Sequence[RewardBatch]) -> Metrics:
    """Mean reward of the 32 and of the 16 responses with the highest reward.

    Args:
        rounds: all rounds of sampling of the step.

    Returns:
        Only the metrics for which enough responses have a verdict.
    """
    values = torch.cat([rewards.rewards[~rewards.failed] for rewards in rounds]).double().sort(descending=True).values
    return {
        f"rollout/reward_best_{count}_mean": Mean(float(values[:count].sum()), count)
        for count in BEST_COUNTS
        if len(values) >= count
    }


def _by_group(rewards: Tensor, group_ids: Tensor, judged: Tensor) -> tuple[Tensor, Tensor]:
    """Best reward of each group with a verdict, and whether its rewards differ."""
    _, index = torch.unique(group_ids[judged], return_inverse=True)
    num_groups = int(index.max()) + 1 if index.numel() else 0
    best = torch.full((num_groups,), -torch.inf, dtype=rewards.dtype).scatter_reduce(0, index, rewards[judged], "amax")
    worst = torch.full((num_groups,), torch.inf, dtype=rewards.dtype).scatter_reduce(0, index, rewards[judged], "amin")
    return best, best > worst
