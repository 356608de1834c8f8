"""The bytes that the planner counts are those of a real ``RolloutBatch``."""

from dataclasses import fields, replace

import pytest
import torch

from gtpo_megatron.batch import RolloutBatch
from gtpo_megatron.companions.planner.known_models import find_shape
from gtpo_megatron.companions.planner.object_store import response_bytes, steps_in_store, stored_bytes
from gtpo_megatron.config.algorithm import GTPOConfig, OffPolicyConfig
from recipes import tiny_cpu

RESPONSES = 64
DENSE, EXPERTS = "Qwen/Qwen2.5-7B", "Qwen/Qwen3-30B-A3B"


def run_of(**changes):
    config = tiny_cpu.gtpo()
    algorithm = GTPOConfig(off_policy=OffPolicyConfig(mode="truncate" if "max_staleness" in changes else "off"))
    return replace(config, algorithm=algorithm, rollout=replace(config.rollout, **changes))


def batch_of(config, shape):
    """Responses and prompts at their limits, with every tensor that this configuration has."""
    rollout = config.rollout
    prompt, response = config.data.max_prompt_tokens, rollout.sampling.max_response_tokens
    wide = (RESPONSES, response)
    routed = None
    if rollout.returns_routing:
        shape_of_routing = (shape.num_expert_layers, shape.experts.experts_per_token)
        routed = torch.zeros(RESPONSES * (prompt + response - 1), *shape_of_routing, dtype=torch.uint8)
    return RolloutBatch(
        prompt_ids=torch.zeros(RESPONSES, prompt, dtype=torch.int64),
        prompt_lengths=torch.full((RESPONSES,), prompt),
        response_ids=torch.zeros(wide, dtype=torch.int64),
        response_lengths=torch.full((RESPONSES,), response),
        loss_mask=torch.ones(wide, dtype=torch.bool),
        rollout_logprobs=torch.zeros(wide),
        group_ids=torch.arange(RESPONSES),
        truncated=torch.zeros(RESPONSES, dtype=torch.bool),
        policy_version=0,
        token_entropy=torch.zeros(wide) if rollout.entropy_source == "rollout" else None,
        token_versions=torch.zeros(wide, dtype=torch.int64) if rollout.partial else None,
        routed_experts=routed,
    )


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        (DENSE, {}),
        (DENSE, {"entropy_source": "rollout"}),
        (DENSE, {"max_staleness": 1, "partial": True}),
        (EXPERTS, {"returns_routing": True}),
    ],
)
def test_bytes_of_a_response(model, changes):
    config, shape = run_of(**changes), find_shape(model)
    batch = batch_of(config, shape)
    values = (getattr(batch, one.name) for one in fields(RolloutBatch))
    counted = sum(value.nbytes for value in values if isinstance(value, torch.Tensor))
    assert response_bytes(config, shape) * RESPONSES == pytest.approx(counted, rel=0.03)


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({}, 1),
        ({"max_staleness": 1}, 2),
        ({"max_staleness": 4, "partial": True}, 6),
        ({"max_staleness": 4, "partial": True, "over_sample": 2.0}, 3),
    ],
)
def test_steps_whose_responses_are_there_together(changes, steps):
    config = run_of(**changes)
    assert steps_in_store(config) == steps
    shape = find_shape(DENSE)
    num = config.data.prompts_per_step * config.rollout.group_size * steps
    assert stored_bytes(config, shape, num_engine_nodes=2) == num // 2 * response_bytes(config, shape)
