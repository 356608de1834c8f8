"""Made-up responses of the recipe's greatest length, for the memory and the seconds of the trainer.

What a fresh model samples ends where it likes; the plan is for the longest sequences.
"""

import math

import torch

from gtpo_megatron.batch import RewardBatch, RolloutBatch, mask_of_lengths
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.weights.architecture import Architecture

MICRO_BATCHES = 2
"""Of each replica and pipeline stage, so that a pipeline is full."""


def full_rollouts(config: RunConfig, architecture: Architecture, *, version: int) -> RolloutBatch:
    """Responses as long as they may be, as many as fill some micro-batches of every replica; whole groups.

    Never more than a step has.
    """
    prompt, response = config.data.max_prompt_tokens, config.rollout.sampling.max_response_tokens
    group = config.rollout.group_size
    parallel = config.parallel
    in_micro_batch = max(1, config.update.micro_batch_tokens // (prompt + response))
    wanted = MICRO_BATCHES * parallel.pipeline_parallel_size * in_micro_batch * parallel.data_parallel_size
    groups = min(config.data.prompts_per_step, math.ceil(wanted / group))
    rows = groups * group
    generator = torch.Generator().manual_seed(config.seed)
    lengths = torch.full((rows,), response)
    experts = architecture.experts
    routing = None
    if config.rollout.returns_routing and experts is not None:
        routers = sum(experts.layers)
        tokens = rows * (prompt + response - 1)
        # experts in turns: as balanced as routers can be
        first = torch.arange(tokens)[:, None, None] * experts.experts_per_token
        routing = (first + torch.arange(experts.experts_per_token)).expand(-1, routers, -1) % experts.num_experts
        routing = routing.to(torch.uint8 if experts.num_experts <= 256 else torch.int16).contiguous()
    return RolloutBatch(
        prompt_ids=torch.randint(0, architecture.vocab_size, (rows, prompt), generator=generator),
        prompt_lengths=torch.full((rows,), prompt),
        response_ids=torch.randint(0, architecture.vocab_size, (rows, response), generator=generator),
        response_lengths=lengths,
        loss_mask=mask_of_lengths(lengths, response),
        rollout_logprobs=torch.full((rows, response), -math.log(architecture.vocab_size)),
        group_ids=torch.arange(groups).repeat_interleave(group),
        truncated=torch.zeros(rows, dtype=torch.bool),
        policy_version=version,
        token_entropy=torch.ones(rows, response) if config.rollout.entropy_source == "rollout" else None,
        routed_experts=routing,
    )


def mixed_rewards(rollouts: RolloutBatch, config: RunConfig) -> RewardBatch:
    """Right and wrong responses in turns, so that every group has something to learn."""
    rows = torch.arange(rollouts.num_responses)
    right = config.algorithm.success_threshold + 1.0
    rewards = torch.where(rows % 2 == 0, right, 0.0).float()
    return RewardBatch(rewards=rewards, failed=torch.zeros(len(rows), dtype=torch.bool))
