"""Qwen3-32B on 64 GPUs of 80 GB: it thinks before it answers, in up to 16,384 or 32,768 tokens; model and GPUs ours.

``recipes/math_run.py`` has what is not said here, each value marked as the paper's or ours.
"""

from gtpo_megatron.config.run import RunConfig
from recipes.math_run import (
    LONG_RESPONSE_TOKENS,
    THINKING,
    THINKING_RESPONSE_TOKENS,
    Method,
    OnGPUs,
    by_method,
    math_run,
)

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
        template_options=THINKING,
    )


ON_64_GPUS_LONG = OnGPUs(
    num_gpus=64,
    tensor_parallel_size=4,
    pipeline_parallel_size=2,
    context_parallel_size=4,
    engine_size=4,
    max_concurrent_sequences=128,
)


def math_32k_64gpu(method: Method = "gtpo", *, num_steps: int = 500, seed: int = 0) -> RunConfig:
    """Sequences of 34,816 tokens, within the model's own context: four ranks share each."""
    return math_run(
        "Qwen/Qwen3-32B",
        method,
        ON_64_GPUS_LONG,
        num_steps=num_steps,
        seed=seed,
        max_response_tokens=LONG_RESPONSE_TOKENS,
        stage_deadline_s=21600.0,
        template_options=THINKING,
    )


gtpo_16k_64gpu, grpo_s_16k_64gpu, dapo_16k_64gpu, grpo_16k_64gpu = by_method(math_16k_64gpu)
gtpo_32k_64gpu, grpo_s_32k_64gpu, dapo_32k_64gpu, grpo_32k_64gpu = by_method(math_32k_64gpu)
