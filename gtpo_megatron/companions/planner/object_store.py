"""Responses in Ray's object store: of the step that is trained, and of those that are sampled ahead.

A response stays on the node of its engine until its step is over. Per token of its row a ``RolloutBatch`` has ids (8
bytes), the loss mask (1) and log-probs (4); with ``entropy_source="rollout"`` entropies (4); if a push may find it in
flight, versions (8). Rows of a piece are as long as its longest, so every response is counted at the length limit.
"""

import math

from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.weights.model_shape import ModelShape

ID_BYTES, MASK_BYTES, NUMBER_BYTES = 8, 1, 4


def response_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Bytes of one response at the length limit."""
    rollout, prompt_tokens = config.rollout, config.data.max_prompt_tokens
    response_tokens = rollout.sampling.max_response_tokens
    per_token = ID_BYTES + MASK_BYTES + NUMBER_BYTES
    per_token += NUMBER_BYTES if rollout.entropy_source == "rollout" else 0
    per_token += ID_BYTES if rollout.partial else 0
    routing = 0
    if rollout.returns_routing and shape.experts is not None:
        choice_bytes = 1 if shape.experts.num_experts <= 256 else 2
        routing = shape.num_expert_layers * shape.experts.experts_per_token * choice_bytes
    return prompt_tokens * (ID_BYTES + routing) + response_tokens * (per_token + routing)


def steps_in_store(config: RunConfig) -> float:
    """Steps whose responses are there at the same time, the one that is trained included."""
    rollout = config.rollout
    ahead = float(rollout.max_staleness)
    if rollout.is_continuous:
        ahead = rollout.max_staleness + 1 if rollout.over_sample is None else rollout.over_sample
    return 1 + ahead


def stored_bytes(config: RunConfig, shape: ModelShape, *, num_engine_nodes: int) -> int:
    """Most bytes of responses on one node, if engines share the prompts evenly."""
    responses = steps_in_store(config) * config.data.prompts_per_step * config.rollout.group_size
    return math.ceil(responses / num_engine_nodes) * response_bytes(config, shape)
