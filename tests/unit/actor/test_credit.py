"""The credit stage gives credit what it knows of responses; no model is needed for it."""

import dataclasses
from types import SimpleNamespace

import torch

from gtpo_megatron.actor.credit import credit_batch
from gtpo_megatron.batch import RewardBatch, RolloutBatch, ScoredBatch
from gtpo_megatron.config.algorithm.base import SoftOverlongPenalty
from gtpo_megatron.distributed.advantage_reducer import reduction_over
from recipes import tiny_cpu


def shaped_rewards(truncated):
    """Of two responses with two tokens of their own each, under a limit of 8."""
    config = tiny_cpu.gtpo()
    ramp = SoftOverlongPenalty(max_tokens=8, buffer_tokens=4, applies_to="all")
    rollouts = RolloutBatch(
        prompt_ids=torch.ones(2, 1, dtype=torch.int64),
        prompt_lengths=torch.tensor([1, 1]),
        response_ids=torch.ones(2, 2, dtype=torch.int64),
        response_lengths=torch.tensor([2, 2]),
        loss_mask=torch.ones(2, 2, dtype=torch.bool),
        rollout_logprobs=torch.zeros(2, 2),
        group_ids=torch.tensor([0, 0]),
        truncated=torch.tensor(truncated),
        policy_version=0,
    )
    scored = ScoredBatch(
        rollouts=rollouts,
        global_rows=(0, 1),
        prompt_groups=(0,),
        policy_version=0,
        old_logprobs=torch.full((2, 2), -1.0),
        token_entropy=torch.ones(2, 2),
        scored_version=0,
    )
    train_batch, _ = credit_batch(
        SimpleNamespace(
            algorithm=dataclasses.replace(config.algorithm, length_penalty=ramp),
            environment=config.environment,
            rollout=config.rollout,
            update=config.update,
        ),
        scored,
        RewardBatch(rewards=torch.tensor([1.0, 0.0]), failed=torch.zeros(2, dtype=torch.bool)),
        shaped_tokens=None,
        reduction=reduction_over(None),
    )
    return train_batch.shaped_rewards


def test_a_length_penalty_hears_which_responses_a_limit_has_cut():
    difference = shaped_rewards([False, True]) - shaped_rewards([False, False])
    torch.testing.assert_close(difference, torch.tensor([[0.0, 0.0], [-1.0, -1.0]]))
