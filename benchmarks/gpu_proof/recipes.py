"""The CPU's recipes on one GPU, which sampler and trainer share, in bfloat16; tasks, batches and steps are theirs."""

from dataclasses import replace

from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.config.rollout import WeightSyncConfig
from gtpo_megatron.config.run import RunConfig
from recipes import smollm2_cpu, tiny_cpu


def tiny(*, num_steps: int = 40, seed: int = 0) -> RunConfig:
    """``recipes.tiny_cpu:gtpo``."""
    return _on_one_gpu(tiny_cpu.gtpo(num_steps=num_steps, seed=seed), kv_cache_mib=2048)


def smollm2(*, num_steps: int = 20, seed: int = 0) -> RunConfig:
    """``recipes.smollm2_cpu:gtpo``, for twice its steps."""
    return _on_one_gpu(smollm2_cpu.gtpo(num_steps=num_steps, seed=seed), kv_cache_mib=4096)


def _on_one_gpu(config: RunConfig, *, kv_cache_mib: int) -> RunConfig:
    return replace(
        config,
        name=config.name.replace("_cpu_", "_1gpu_"),
        model=replace(config.model, dtype="bfloat16"),
        parallel=ParallelConfig(num_ranks=1, distributed_optimizer=True),
        rollout=replace(config.rollout, placement="colocated", dtype="bfloat16", kv_cache_mib=kv_cache_mib),
        weight_sync=WeightSyncConfig(verify_every_steps=10),
        logging=replace(config.logging, tensorboard=False),
        cluster=replace(config.cluster, start_deadline_s=400.0),
    )
