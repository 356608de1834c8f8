"""A checkpoint keeps what was sampled ahead whole: problems with their columns, rewards with their parts."""

import io

import torch

from gtpo_megatron.batch import EpisodeResult, Problem, PromptBatch, RewardBatch, RolloutBatch, mask_of_lengths
from gtpo_megatron.branches import Branch
from gtpo_megatron.observability.metrics import Mean
from gtpo_megatron.orchestration.loop.sampling import SampledStep
from gtpo_megatron.orchestration.loop.sampling_state import from_plain, to_plain
from gtpo_megatron.orchestration.stages.rollouts import RolloutHandle, joined

CHAT = ({"role": "user", "content": "1+1?"},)


def test_columns_and_parts_survive_a_checkpoint():
    problem = Problem(
        problem_id="a", prompt_ids=(1, 2), answer="", prompt=CHAT, columns_json='{"tests":[{"input":"1"}]}'
    )
    rollouts = RolloutBatch(
        prompt_ids=torch.ones(1, 2, dtype=torch.int64),
        prompt_lengths=torch.tensor([2]),
        response_ids=torch.ones(1, 2, dtype=torch.int64),
        response_lengths=torch.tensor([2]),
        loss_mask=mask_of_lengths(torch.tensor([2]), 2),
        rollout_logprobs=torch.zeros(1, 2),
        branches=((Branch(1, 0),),),
        group_ids=torch.tensor([5]),
        truncated=torch.zeros(1, dtype=torch.bool),
        policy_version=0,
        results=(EpisodeResult(reward=0.5, parts={"turns": 2.0}),),
    )
    rewards = RewardBatch(
        rewards=torch.ones(1),
        failed=torch.zeros(1, dtype=torch.bool),
        parts={"t": torch.ones(1), "environment_s": torch.ones(1), "environment_wait_s": torch.ones(1)},
        info=('{"a":1}',),
        turn_rewards=((0.25, 0.75),),
    )
    sampled = SampledStep(
        prompts=PromptBatch(problems=(problem,), group_ids=(5,)),
        rollouts=RolloutHandle.of(rollouts),
        rewards=rewards,
        metrics={"reward/t_mean": Mean(1.0, 1), "timing/environment_s": Mean(1.0, 1)},
    )
    file = io.BytesIO()
    fresh = RolloutHandle.of(rollouts)
    torch.save(to_plain(sampled, fresh.fetch()), file)
    file.seek(0)
    found = from_plain(torch.load(file, weights_only=True), RolloutHandle.of)
    assert found.prompts == sampled.prompts
    assert found.rollouts.fetch().branches == rollouts.branches
    assert found.rollouts.fetch().paths(0) == rollouts.paths(0)
    assert found.rewards.info == rewards.info
    assert found.rewards.turn_rewards == rewards.turn_rewards
    assert torch.equal(found.rewards.parts["t"], rewards.parts["t"])
    assert found.metrics["reward/t_mean"] == sampled.metrics["reward/t_mean"]
    # what an environment gave is in the rewards by then, and a time would make two runs of one seed differ
    assert found.rollouts.fetch().results == ()
    assert joined([found.rollouts, fresh]).fetch().num_responses == 2  # a step of both
    assert list(found.rewards.parts) == ["t"]
    assert list(found.metrics) == ["reward/t_mean"]
