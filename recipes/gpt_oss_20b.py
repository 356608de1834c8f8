"""gpt-oss-20b, sinks, alternating windows and biased experts, in the paper's setting on one node of 8 GPUs of 80 GB.

Model and GPUs are ours. The hub's folder, whose experts are MXFP4, is read as bfloat16.
``recipes/math_run.py`` has what is not said here, marked as the paper's or ours.

IT THINKS, AND RESPONSES ARE CUT AT THE PAPER'S 4,096 TOKENS, at the template's own effort (medium) many of them; one
without an answer is wrong. Short thoughts: ``--data.template-options '{"reasoning_effort": "low"}'``. The planner has
room for 16,384 with a tensor-parallel size of 4 (73.8 GiB, 759 s a step).
"""

from gtpo_megatron.config.run import RunConfig
from recipes.math_run import Method, OnGPUs, by_method, math_run

ON_8_GPUS = OnGPUs(
    num_gpus=8,
    tensor_parallel_size=2,
    expert_parallel_size=8,
    engine_size=2,
    max_concurrent_sequences=256,
    kv_cache_gib=16,
)


def math_8gpu(method: Method = "gtpo", *, num_steps: int = 500, seed: int = 0) -> RunConfig:
    """One of the paper's methods."""
    return math_run("openai/gpt-oss-20b", method, ON_8_GPUS, num_steps=num_steps, seed=seed)


gtpo_8gpu, grpo_s_8gpu, dapo_8gpu, grpo_8gpu = by_method(math_8gpu)
