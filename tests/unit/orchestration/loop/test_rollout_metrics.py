"""What the driver says of a batch, against counting by hand."""

import math

import pytest
import torch

from gtpo_megatron.batch import RewardBatch
from gtpo_megatron.errors import WeightSyncError
from gtpo_megatron.observability.metrics import to_scalars
from gtpo_megatron.orchestration.loop.policy_check import check_version
from gtpo_megatron.orchestration.loop.rollout_metrics import best_rewards, rollout_metrics
from gtpo_megatron.orchestration.stages.rollouts import RolloutHandle


def handle(group_ids, lengths, truncated=None, version=3, num_multi_version=0):
    return RolloutHandle(
        objects=(),
        places=(),
        prompt_lengths=torch.full((len(lengths),), 5),
        response_lengths=torch.tensor(lengths),
        own_lengths=torch.tensor(lengths),
        sequence_tokens=torch.tensor(lengths) + 5,
        group_ids=torch.tensor(group_ids),
        truncated=torch.tensor(truncated or [False] * len(lengths)),
        is_multi_version=torch.arange(len(lengths)) < num_multi_version,
        policy_version=version,
        engines=torch.zeros(len(lengths), dtype=torch.int64),
    )


def rewards(values, failed=None):
    return RewardBatch(rewards=torch.tensor(values), failed=torch.tensor(failed or [False] * len(values)))


def test_a_batch_by_hand():
    rollouts = handle([7, 7, 9, 9, 8, 8], [10, 20, 30, 40, 50, 60], [False] * 5 + [True], num_multi_version=2)
    found = to_scalars(rollout_metrics(rollouts, rewards([1.0, 0.0, 0.0, 0.0, 1.0, 1.0])))
    assert found == {
        "rollout/foreign_tokens_count": 0.0,
        "rollout/groups_mixed_frac": pytest.approx(1 / 3),
        "rollout/multi_version_count": 2.0,
        "rollout/prompt_tokens": 5.0,
        "rollout/response_length_max_tokens": 60.0,
        "rollout/response_length_tokens": 35.0,
        "rollout/response_tokens_count": 210.0,
        "rollout/responses_count": 6.0,
        "rollout/best_of_group_reward_mean": pytest.approx(2 / 3),
        "rollout/reward_failed_count": 0.0,
        "rollout/reward_mean": 0.5,
        "rollout/reward_over_budget_count": 0.0,
        "rollout/truncated_frac": pytest.approx(1 / 6),
    }


def test_a_response_without_a_verdict_is_counted_but_not_a_zero():
    rollouts = handle([1, 1, 2, 2], [1, 1, 1, 1])
    found = to_scalars(rollout_metrics(rollouts, rewards([1.0, 0.0, 0.0, 0.0], [False, True, True, True])))
    assert found["rollout/reward_mean"] == 1.0
    assert found["rollout/reward_failed_count"] == 3.0
    assert found["rollout/best_of_group_reward_mean"] == 1.0  # group 2 has no verdict and is no group here
    assert found["rollout/groups_mixed_frac"] == 0.0


def test_the_best_32_and_16_are_taken_over_all_rounds_together():
    first = rewards([1.0] * 10 + [0.0] * 12)
    second = rewards([0.5] * 9 + [1.0], [False] * 9 + [True])  # the last has no verdict
    found = to_scalars(best_rewards([first, second]))
    assert found["rollout/reward_best_16_mean"] == pytest.approx((10 + 6 * 0.5) / 16)
    assert "rollout/reward_best_32_mean" not in found  # 31 have a verdict
    third = rewards([0.25])
    assert to_scalars(best_rewards([first, second, third]))["rollout/reward_best_32_mean"] == pytest.approx(14.75 / 32)


def test_no_verdict_at_all_is_not_a_number():
    found = to_scalars(rollout_metrics(handle([1, 1], [1, 1]), rewards([0.0, 0.0], [True, True])))
    assert math.isnan(found["rollout/reward_mean"])


def test_another_version_stops_the_run():
    with pytest.raises(WeightSyncError, match="come from policy version 3, the trainer has version 4"):
        check_version(handle([1], [1]), version=4)
    check_version(handle([1], [1]), version=3)


def test_parts_of_the_reward_are_means_over_the_responses_that_have_them():
    batch = RewardBatch(
        rewards=torch.tensor([1.0, 0.0, 1.0]),
        failed=torch.tensor([False, False, True]),
        parts={"tests": torch.tensor([1.0, 0.5, 9.0]), "rare": torch.tensor([torch.nan, torch.nan, 1.0])},
    )
    found = to_scalars(rollout_metrics(handle([1, 1, 2], [1, 1, 1]), batch))
    assert found["reward/tests_mean"] == 0.75
    assert "reward/rare_mean" not in found  # only a response without a verdict has it


def test_refused_requests_and_ungraded_episodes_are_counted():
    """A refusal that failed its episode counts too; an episode without a verdict is not ungraded beside that."""
    batch = RewardBatch(
        rewards=torch.tensor([1.0, 0.0, 0.0, 0.0]),
        failed=torch.tensor([False, False, True, True]),
        parts={
            "requests_refused": torch.tensor([0.0, 2.0, 3.0, torch.nan]),
            "requests_unenforced": torch.tensor([1.0, 0.0, 3.0, torch.nan]),
            "ended_ungraded": torch.tensor([0.0, 1.0, 1.0, torch.nan]),
        },
    )
    found = to_scalars(rollout_metrics(handle([1, 1, 2, 2], [1, 1, 1, 1]), batch))
    assert found["rollout/requests_refused_count"] == 5.0
    assert found["rollout/responses_refused_count"] == 2.0
    assert found["rollout/requests_unenforced_count"] == 4.0
    assert found["rollout/responses_ungraded_count"] == 1.0
    assert not [name for name in found if name.startswith("reward/")]


def test_the_wait_for_environments_is_the_longest_of_all_episodes():
    """One that hung and has no verdict lived through most of it."""
    batch = RewardBatch(
        rewards=torch.tensor([1.0, 0.0, 0.0]),
        failed=torch.tensor([False, False, True]),
        parts={
            "turns": torch.tensor([1.0, 2.0, 3.0]),
            "environment_s": torch.tensor([1.0, 2.0, 30.0]),
            "environment_wait_s": torch.tensor([1.5, 2.5, 31.0]),
        },
    )
    found = to_scalars(rollout_metrics(handle([1, 1, 2], [1, 1, 1]), batch))
    names = ("reward/turns_mean", "timing/environment_s", "timing/environment_wait_s")
    assert [found[name] for name in names] == [1.5, 1.5, 31.0]
    assert "reward/environment_wait_s_mean" not in found
