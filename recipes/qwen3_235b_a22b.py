"""Qwen3-235B-A22B, a mixture of experts, in the paper's setting on 128 GPUs of 80 GB. Model and GPUs are ours.

IT THINKS, AND MOST OF ITS RESPONSES ARE CUT: at the paper's 4,096 tokens few get to an answer, and one that does not is
wrong. The planner has 16,384 on these GPUs only with eight context-parallel ranks and nothing to spare (80.0 GiB of 80,
six sequences of full length in an engine's cache, 1,431 s a step). Without its thoughts: ``--data.template-options
'{"enable_thinking": false}'``. ``recipes/math_run.py`` has what is not said here, each value marked as the paper's or
ours.
"""

from gtpo_megatron.config.run import RunConfig
from recipes.math_run import THINKING, Method, OnGPUs, by_method, math_run

ON_128_GPUS = OnGPUs(
    num_gpus=128,
    tensor_parallel_size=4,
    pipeline_parallel_size=2,  # its 94 layers are 2 x 47
    context_parallel_size=2,
    expert_parallel_size=64,  # two experts of each layer on every rank
    engine_size=8,
    shares_experts_whole=True,  # else every rank would talk with all 127 others in a push
    max_concurrent_sequences=64,
    kv_cache_gib=5,
)


def math_128gpu(method: Method = "gtpo", *, num_steps: int = 500, seed: int = 0) -> RunConfig:
    """One of the paper's methods."""
    return math_run(
        "Qwen/Qwen3-235B-A22B", method, ON_128_GPUS, num_steps=num_steps, seed=seed, template_options=THINKING
    )


gtpo_128gpu, grpo_s_128gpu, dapo_128gpu, grpo_128gpu = by_method(math_128gpu)
