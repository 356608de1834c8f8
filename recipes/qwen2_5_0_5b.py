"""Qwen2.5-0.5B-Instruct on GSM8K, on one GPU of 24 GB; ``recipes/gsm8k_run.py`` has what is not said here."""

from gtpo_megatron.config.run import RunConfig
from recipes.gsm8k_run import gsm8k_run
from recipes.math_run import Method, OnGPUs, by_method

ON_1_GPU = OnGPUs(
    num_gpus=1,
    tensor_parallel_size=1,
    engine_size=1,
    max_concurrent_sequences=256,
    kv_cache_gib=6,
)


def math_1gpu(method: Method = "gtpo", *, num_steps: int = 200, seed: int = 0) -> RunConfig:
    """One of the paper's methods."""
    return gsm8k_run(
        "Qwen/Qwen2.5-0.5B-Instruct", method, ON_1_GPU, micro_batch_tokens=4096, num_steps=num_steps, seed=seed
    )


gtpo_1gpu, grpo_s_1gpu, dapo_1gpu, grpo_1gpu = by_method(math_1gpu)
