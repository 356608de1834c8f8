"""Qwen3-32B on 64 GPUs of 80 GB, with responses of 16,384 tokens: it thinks before it answers. Model and GPUs are ours.

``recipes/math_run.py`` has what is not said here, each value marked as the paper's or ours.
"""

from gtpo_megatron.config.run import RunConfig
from recipes.math_run import THINKING_RESPONSE_TOKENS, Method, OnGPUs, by_method, math_run

ON_64_GPUS = OnGPUs(
    num_gpus=64,
    tensor_parallel_size=4,
    pipeline_parallel_size=4,
    context_parallel_size=2,
    engine_size=4,
    max_concurrent_sequences=128,
)


def math_16k_64gpu(method: Method = "gtpo", *, num_steps: int = 500, seed: int = 0) -> RunConfig:
    """One of the paper's methods."""
    return math_run(
        "Qwen/Qwen3-32B",
        method,
        ON_64_GPUS,
        num_steps=num_steps,
        seed=seed,
        max_response_tokens=THINKING_RESPONSE_TOKENS,
    )


gtpo_16k_64gpu, grpo_s_16k_64gpu, dapo_16k_64gpu, grpo_16k_64gpu = by_method(math_16k_64gpu)
