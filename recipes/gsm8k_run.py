"""The common settings of the recipes for one GPU: GSM8K (arXiv 2110.14168), for a small instruct model.

Every value is ours; the methods and what they share are those of ``recipes/math_run.py``.
"""

from gtpo_megatron.config.cluster import ClusterConfig
from gtpo_megatron.config.model import ModelConfig
from gtpo_megatron.config.optimizer import UpdateConfig
from gtpo_megatron.config.output import CheckpointConfig
from gtpo_megatron.config.problems import DataConfig, EvaluationConfig
from gtpo_megatron.config.rollout import RolloutConfig, SamplingConfig, WeightSyncConfig
from gtpo_megatron.config.run import RunConfig
from recipes.math_run import OPTIMIZER, Method, OnGPUs, algorithm

MAX_PROMPT_TOKENS = 512  # the longest question has about 300
MAX_RESPONSE_TOKENS = 1024  # a solution has about 200


def gsm8k_run(
    model: str, method: Method, on: OnGPUs, *, micro_batch_tokens: int, num_steps: int, seed: int
) -> RunConfig:
    """One run on one GPU, which sampler and trainer use in turns.

    Args:
        model: name on the hub; the run gives the weights: ``--model.path FOLDER``.
        method: one of the paper's tables.
        on: the GPU.
        micro_batch_tokens: budget of a forward pass.
        num_steps: rollout batches; 117 are an epoch.
        seed: of prompts, samples and mini-batches.
    """
    short_name = model.partition("/")[2].lower().replace(".", "_").replace("-", "_")
    sampling = SamplingConfig(temperature=1.0, top_p=1.0, top_k=0, max_response_tokens=MAX_RESPONSE_TOKENS)
    return RunConfig(
        name=f"{short_name}_{method}_{on.num_gpus}gpu",
        seed=seed,
        num_steps=num_steps,
        model=ModelConfig(
            path=model,
            dtype="bfloat16",
            max_sequence_tokens=MAX_PROMPT_TOKENS + MAX_RESPONSE_TOKENS,
            recompute=on.recompute,
        ),
        data=DataConfig(train_path="gsm8k", prompts_per_step=64, max_prompt_tokens=MAX_PROMPT_TOKENS),
        evaluation=EvaluationConfig(benchmarks=("gsm8k-test",), every_steps=50, samples=4, sampling=sampling),
        algorithm=algorithm(method, max_response_tokens=MAX_RESPONSE_TOKENS),
        optimizer=OPTIMIZER,
        parallel=on.parallel,
        rollout=RolloutConfig(
            group_size=8,
            sampling=sampling,
            placement="colocated",
            num_engines=on.num_gpus // on.engine_size,
            dtype="bfloat16",
            tensor_parallel_size=on.engine_size,
            kv_cache_mib=on.kv_cache_gib << 10,
            max_concurrent_sequences=on.max_concurrent_sequences,
        ),
        update=UpdateConfig(updates_per_rollout=1, mini_batch_prompts=0, micro_batch_tokens=micro_batch_tokens),
        weight_sync=WeightSyncConfig(verify_every_steps=50),
        checkpoint=CheckpointConfig(every_steps=20, keep=2, export_hf=True),
        cluster=ClusterConfig(mode="ray", object_store_mib=2048, start_deadline_s=900.0, stage_deadline_s=3600.0),
    )
