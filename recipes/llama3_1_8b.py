"""Llama-3.1-8B-Instruct in the paper's setting, on 16 GPUs of 80 GB. Model and GPUs are ours.

Not the base model, which has no chat template. ``recipes/math_run.py`` has what is not said here, each value marked as
the paper's or ours.
"""

from gtpo_megatron.config.run import RunConfig
from recipes.math_run import Method, OnGPUs, by_method, math_run

ON_16_GPUS = OnGPUs(
    num_gpus=16,
    tensor_parallel_size=2,
    pipeline_parallel_size=2,
    engine_size=1,
    max_concurrent_sequences=256,
)


def math_16gpu(method: Method = "gtpo", *, num_steps: int = 500, seed: int = 0) -> RunConfig:
    """One of the paper's methods."""
    return math_run("meta-llama/Llama-3.1-8B-Instruct", method, ON_16_GPUS, num_steps=num_steps, seed=seed)


gtpo_16gpu, grpo_s_16gpu, dapo_16gpu, grpo_16gpu = by_method(math_16gpu)
