"""DeepSeek-V3-Base, multi-latent attention and experts, in the paper's setting on 256 H100s.

Model and GPUs are ours. The weights are 1,250 GiB, so an engine has four nodes: a stage of the layers on each, whose
eight GPUs share them. The hub's folder, whose weights are FP8, is read as bfloat16. ``recipes/math_run.py`` has what is
not said here, each value marked as the paper's or ours.
"""

from dataclasses import replace

from gtpo_megatron.config.run import RunConfig
from recipes.math_run import Method, OnGPUs, by_method, math_run

ON_256_GPUS = OnGPUs(
    num_gpus=256,
    tensor_parallel_size=8,
    pipeline_parallel_size=8,
    last_stage_layers=5,  # its 61 layers are 7 x 8 + 5
    expert_parallel_size=32,
    engine_size=8,
    engine_stages=4,
    engine_nodes=4,
    shares_experts_whole=True,  # else every rank would talk with many more others in a push
    max_concurrent_sequences=128,
    kv_cache_gib=8,
)


def math_256gpu(method: Method = "gtpo", *, num_steps: int = 500, seed: int = 0) -> RunConfig:
    """One of the paper's methods; the optimizer is on the host."""
    run = math_run("deepseek-ai/DeepSeek-V3-Base", method, ON_256_GPUS, num_steps=num_steps, seed=seed)
    return replace(run, optimizer=replace(run.optimizer, offload_fraction=1.0))


gtpo_256gpu, grpo_s_256gpu, dapo_256gpu, grpo_256gpu = by_method(math_256gpu)
