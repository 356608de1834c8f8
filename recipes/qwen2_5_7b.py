"""Qwen2.5-7B in the paper's setting: on its 64 GPUs, and on one node, where a step takes longer and is the same.

``recipes/math_run.py`` has what is not said here, each value marked as the paper's or ours.
"""

from gtpo_megatron.config.run import RunConfig
from recipes.math_run import Method, OnGPUs, by_method, math_run

MODEL = "Qwen/Qwen2.5-7B"  # paper's

ON_8_GPUS = OnGPUs(
    num_gpus=8,
    tensor_parallel_size=2,
    pipeline_parallel_size=2,
    engine_size=1,
    max_concurrent_sequences=256,
)
ON_64_GPUS = OnGPUs(
    num_gpus=64,  # paper's
    tensor_parallel_size=4,
    engine_size=1,
    max_concurrent_sequences=256,
)


def math_8gpu(method: Method = "gtpo", *, num_steps: int = 500, seed: int = 0) -> RunConfig:
    """The paper's batch on one node."""
    return math_run(MODEL, method, ON_8_GPUS, num_steps=num_steps, seed=seed)


def paper_64gpu(method: Method = "gtpo", *, num_steps: int = 500, seed: int = 0) -> RunConfig:
    """The paper's setting with one of its methods."""
    return math_run(MODEL, method, ON_64_GPUS, num_steps=num_steps, seed=seed)


gtpo_8gpu, grpo_s_8gpu, dapo_8gpu, grpo_8gpu = by_method(math_8gpu)
gtpo_64gpu, grpo_s_64gpu, dapo_64gpu, grpo_64gpu = by_method(paper_64gpu)
