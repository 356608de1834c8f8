"""DeepSeek-V3-Base, multi-latent attention and experts, in the paper's setting on 256 B300s of 288 GB.

Model and GPUs are ours. An engine lies on one node, and the weights are 158 GiB of each of its eight GPUs: smaller ones
do not hold them. The hub's folder, whose weights are FP8, is read as bfloat16. ``recipes/math_run.py`` has what is not
said here, each value marked as the paper's or ours.
"""

from gtpo_megatron.config.run import RunConfig
from recipes.math_run import Method, OnGPUs, by_method, math_run

ON_256_GPUS = OnGPUs(
    num_gpus=256,
    tensor_parallel_size=4,
    pipeline_parallel_size=8,
    last_stage_layers=5,  # its 61 layers are 7 x 8 + 5
    context_parallel_size=2,
    expert_parallel_size=16,  # over 32 a host needs 2.4 TiB and a step 147 s, over eight 3.6 TiB and 117 s
    engine_size=8,
    shares_experts_whole=True,  # else every rank would talk with all 255 others in a push
    max_concurrent_sequences=64,
    kv_cache_gib=28,
)


def math_256gpu(method: Method = "gtpo", *, num_steps: int = 500, seed: int = 0) -> RunConfig:
    """One of the paper's methods."""
    return math_run("deepseek-ai/DeepSeek-V3-Base", method, ON_256_GPUS, num_steps=num_steps, seed=seed)


gtpo_256gpu, grpo_s_256gpu, dapo_256gpu, grpo_256gpu = by_method(math_256gpu)
