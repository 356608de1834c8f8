"""Qwen3-30B-A3B, a mixture of experts, in the paper's setting on 32 GPUs of 80 GB. Model and GPUs are ours.

The base model, as the paper's: the tuned one thinks longer than the paper's 4,096 tokens. ``recipes/math_run.py`` has
what is not said here, each value marked as the paper's or ours.
"""

from gtpo_megatron.config.run import RunConfig
from recipes.math_run import ADAPTER, THINKING, Method, OnGPUs, by_method, math_run

ON_32_GPUS = OnGPUs(
    num_gpus=32,
    tensor_parallel_size=1,
    pipeline_parallel_size=2,
    context_parallel_size=2,
    expert_parallel_size=8,  # the experts of a layer are within a node
    engine_size=4,
    max_concurrent_sequences=256,
)


LORA_ON_8_GPUS = OnGPUs(
    num_gpus=8,
    tensor_parallel_size=1,
    pipeline_parallel_size=8,  # frozen experts leave room for those of six layers: no token travels to another GPU
    engine_size=4,
    max_concurrent_sequences=256,
    kv_cache_gib=32,
    adapter=ADAPTER,
)


def math_32gpu(method: Method = "gtpo", *, num_steps: int = 500, seed: int = 0) -> RunConfig:
    """One of the paper's methods."""
    return math_run(
        "Qwen/Qwen3-30B-A3B-Base", method, ON_32_GPUS, num_steps=num_steps, seed=seed, template_options=THINKING
    )


def lora_8gpu(method: Method = "gtpo", *, num_steps: int = 500, seed: int = 0) -> RunConfig:
    """One of the paper's methods on one node, with low-rank adapters on attention; experts and routers are frozen."""
    return math_run(
        "Qwen/Qwen3-30B-A3B-Base", method, LORA_ON_8_GPUS, num_steps=num_steps, seed=seed, template_options=THINKING
    )


gtpo_lora_8gpu, grpo_s_lora_8gpu, dapo_lora_8gpu, grpo_lora_8gpu = by_method(lora_8gpu)
gtpo_32gpu, grpo_s_32gpu, dapo_32gpu, grpo_32gpu = by_method(math_32gpu)
