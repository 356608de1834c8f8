"""Qwen3-Next-80B-A3B-Instruct, gated delta nets and experts, in the paper's setting on 64 GPUs of 80 GB.

Model and GPUs are ours. ``recipes/math_run.py`` has what is not said here, each value marked as the paper's or ours.
"""

from gtpo_megatron.config.run import RunConfig
from recipes.math_run import Method, OnGPUs, by_method, math_run

ON_64_GPUS = OnGPUs(
    num_gpus=64,
    tensor_parallel_size=1,
    pipeline_parallel_size=4,
    expert_parallel_size=8,  # the experts of a layer are within a node
    recompute="full",  # a delta net keeps more for the backward pass than attention and experts together
    engine_size=8,
    shares_experts_whole=True,  # else every rank would talk with all 63 others in a push
    max_concurrent_sequences=256,
    kv_cache_gib=24,
)


def math_64gpu(method: Method = "gtpo", *, num_steps: int = 500, seed: int = 0) -> RunConfig:
    """One of the paper's methods."""
    return math_run("Qwen/Qwen3-Next-80B-A3B-Instruct", method, ON_64_GPUS, num_steps=num_steps, seed=seed)


gtpo_64gpu, grpo_s_64gpu, dapo_64gpu, grpo_64gpu = by_method(math_64gpu)
