"""gpt-oss-120b, sinks, alternating windows and biased experts, in the paper's setting on 64 GPUs of 80 GB.

Model and GPUs are ours. The hub's folder, whose experts are MXFP4, is read as bfloat16.
``recipes/math_run.py`` has what is not said here, marked as the paper's or ours.

IT THINKS, AND RESPONSES ARE CUT AT THE PAPER'S 4,096 TOKENS, at the template's own effort (medium) many of them; one
without an answer is wrong. Short thoughts: ``--data.template-options '{"reasoning_effort": "low"}'``. The planner has
room for 16,384 in this layout (76.9 GiB, 330 s a step).
"""

from gtpo_megatron.config.run import RunConfig
from recipes.math_run import Method, OnGPUs, by_method, math_run

ON_64_GPUS = OnGPUs(
    num_gpus=64,
    tensor_parallel_size=8,
    pipeline_parallel_size=4,
    expert_parallel_size=8,  # the experts of a layer are within a node
    engine_size=8,
    max_concurrent_sequences=256,
    kv_cache_gib=16,
)


def math_64gpu(method: Method = "gtpo", *, num_steps: int = 500, seed: int = 0) -> RunConfig:
    """One of the paper's methods."""
    return math_run("openai/gpt-oss-120b", method, ON_64_GPUS, num_steps=num_steps, seed=seed)


gtpo_64gpu, grpo_s_64gpu, dapo_64gpu, grpo_64gpu = by_method(math_64gpu)
