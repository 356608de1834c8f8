"""Moonlight-16B-A3B, multi-latent attention and experts, in the paper's setting on 16 GPUs of 80 GB.

Model and GPUs are ours; its context is 8,192 tokens. ``recipes/math_run.py`` has what is not said here, each value
marked as the paper's or ours.
"""

from gtpo_megatron.config.run import RunConfig
from recipes.math_run import Method, OnGPUs, by_method, math_run

ON_16_GPUS = OnGPUs(
    num_gpus=16,
    tensor_parallel_size=1,
    expert_parallel_size=8,  # the experts of a layer are within a node
    engine_size=2,
    max_concurrent_sequences=256,
    kv_cache_gib=40,
)


def math_16gpu(method: Method = "gtpo", *, num_steps: int = 500, seed: int = 0) -> RunConfig:
    """One of the paper's methods."""
    return math_run("moonshotai/Moonlight-16B-A3B", method, ON_16_GPUS, num_steps=num_steps, seed=seed)


gtpo_16gpu, grpo_s_16gpu, dapo_16gpu, grpo_16gpu = by_method(math_16gpu)
