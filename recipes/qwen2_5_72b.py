"""Qwen2.5-72B in the paper's setting, on 128 GPUs of 80 GB. The paper stops at 32B; the GPUs and their layout are ours.

``recipes/math_run.py`` has what is not said here, each value marked as the paper's or ours.
"""

from gtpo_megatron.config.run import RunConfig
from recipes.math_run import Method, OnGPUs, by_method, math_run

ON_128_GPUS = OnGPUs(
    num_gpus=128,
    tensor_parallel_size=8,
    pipeline_parallel_size=4,
    engine_size=8,
    max_concurrent_sequences=256,
)


def math_128gpu(method: Method = "gtpo", *, num_steps: int = 500, seed: int = 0) -> RunConfig:
    """One of the paper's methods."""
    return math_run("Qwen/Qwen2.5-72B", method, ON_128_GPUS, num_steps=num_steps, seed=seed)


gtpo_128gpu, grpo_s_128gpu, dapo_128gpu, grpo_128gpu = by_method(math_128gpu)
