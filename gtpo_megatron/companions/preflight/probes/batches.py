"""Batches without an engine: random tokens in sequences of equal lengths, right and wrong responses in turns."""

import torch

from gtpo_megatron.batch import RewardBatch, RolloutBatch, mask_of_lengths


def random_rollouts(
    rows: int,
    *,
    prompt_tokens: int,
    response_tokens: int,
    vocab_size: int,
    group_size: int,
    seed: int,
    policy_version: int = 0,
) -> RolloutBatch:
    """Random tokens in whole groups."""
    generator, lengths = torch.Generator().manual_seed(seed), torch.full((rows,), response_tokens)
    return RolloutBatch(
        prompt_ids=torch.randint(1, vocab_size, (rows, prompt_tokens), generator=generator),
        prompt_lengths=torch.full((rows,), prompt_tokens),
        response_ids=torch.randint(1, vocab_size, (rows, response_tokens), generator=generator),
        response_lengths=lengths,
        loss_mask=mask_of_lengths(lengths, response_tokens),
        rollout_logprobs=torch.zeros(rows, response_tokens),
        group_ids=torch.arange(rows) // group_size,
        truncated=torch.zeros(rows, dtype=torch.bool),
        policy_version=policy_version,
    )


def rewards_in_turns(rows: int, *, right: float = 1.0) -> RewardBatch:
    """``right`` and 0 in turns, so that every group has something to learn; each response is one turn."""
    rewards = torch.where(torch.arange(rows) % 2 == 0, right, 0.0).float()
    return RewardBatch(
        rewards=rewards,
        failed=torch.zeros(rows, dtype=torch.bool),
        turn_rewards=tuple((reward,) for reward in rewards.tolist()),
    )
