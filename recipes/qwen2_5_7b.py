"""Qwen2.5-7B in the paper's setting: on its 64 GPUs, and on one node, where a step takes longer and is the same.

``sft_8gpu`` is a warm start in the layout of one node; its rate and batch are ours.

And with responses of 65,536 tokens, where four ranks share each sequence.

``recipes/math_run.py`` has what is not said here, each value marked as the paper's or ours.
"""

from dataclasses import replace

from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.config.sft import ConversationData, SftConfig
from recipes.code_run import code_run
from recipes.math_run import ADAPTER, LONGEST_RESPONSE_TOKENS, Method, OnGPUs, by_method, math_run

MODEL = "Qwen/Qwen2.5-7B"  # paper's

ON_8_GPUS = OnGPUs(
    num_gpus=8,
    tensor_parallel_size=2,
    pipeline_parallel_size=2,
    engine_size=1,
    max_concurrent_sequences=256,
)
LORA_ON_1_GPU = OnGPUs(
    num_gpus=1,
    tensor_parallel_size=1,
    engine_size=1,
    max_concurrent_sequences=256,
    kv_cache_gib=24,
    adapter=ADAPTER,
)
ON_64_GPUS = OnGPUs(
    num_gpus=64,  # paper's
    tensor_parallel_size=4,
    engine_size=1,
    max_concurrent_sequences=256,
)

ON_64_GPUS_LONGEST = OnGPUs(
    num_gpus=64,
    tensor_parallel_size=4,
    context_parallel_size=4,
    engine_size=2,
    max_concurrent_sequences=128,
)


def math_8gpu(method: Method = "gtpo", *, num_steps: int = 500, seed: int = 0) -> RunConfig:
    """The paper's batch on one node."""
    return math_run(MODEL, method, ON_8_GPUS, num_steps=num_steps, seed=seed)


def sft_8gpu(*, num_steps: int = 0, seed: int = 0) -> SftConfig:
    """Two epochs of worked answers, or as many steps as are asked for."""
    base = math_8gpu(seed=seed)
    return SftConfig(
        name="qwen2_5_7b_sft_8gpu",
        seed=seed,
        num_steps=num_steps,
        num_epochs=0 if num_steps else 2,
        model=base.model,
        data=ConversationData(train_path="gsm8k", heldout_rows=256, rows_per_step=64),
        optimizer=replace(base.optimizer, learning_rate=1e-5, schedule="cosine", warmup_updates=20),
        parallel=base.parallel,
        checkpoint=base.checkpoint,
        logging=base.logging,
        cluster=base.cluster,
    )


def lora_1gpu(method: Method = "gtpo", *, num_steps: int = 500, seed: int = 0) -> RunConfig:
    """The paper's batch on one GPU, with low-rank adapters over the frozen weights."""
    return math_run(MODEL, method, LORA_ON_1_GPU, num_steps=num_steps, seed=seed)


def paper_64gpu(method: Method = "gtpo", *, num_steps: int = 500, seed: int = 0) -> RunConfig:
    """The paper's setting with one of its methods."""
    return math_run(MODEL, method, ON_64_GPUS, num_steps=num_steps, seed=seed)


def code_8gpu(method: Method = "gtpo", *, num_steps: int = 300, seed: int = 0) -> RunConfig:
    """Programs on one node: TACO, graded by its tests in a sandbox (``recipes/code_run.py``)."""
    return code_run(MODEL, method, ON_8_GPUS, num_steps=num_steps, seed=seed)


def math_64k_64gpu(method: Method = "gtpo", *, num_steps: int = 500, seed: int = 0) -> RunConfig:
    """Sequences of 67,584 tokens, within the 131,072 positions that the base model's ``config.json`` has."""
    return math_run(
        MODEL,
        method,
        ON_64_GPUS_LONGEST,
        num_steps=num_steps,
        seed=seed,
        max_response_tokens=LONGEST_RESPONSE_TOKENS,
        stage_deadline_s=28800.0,
    )


gtpo_lora_1gpu, grpo_s_lora_1gpu, dapo_lora_1gpu, grpo_lora_1gpu = by_method(lora_1gpu)
gtpo_8gpu, grpo_s_8gpu, dapo_8gpu, grpo_8gpu = by_method(math_8gpu)
gtpo_64gpu, grpo_s_64gpu, dapo_64gpu, grpo_64gpu = by_method(paper_64gpu)
gtpo_code_8gpu, grpo_s_code_8gpu, dapo_code_8gpu, grpo_code_8gpu = by_method(code_8gpu)
gtpo_64k_64gpu, grpo_s_64k_64gpu, dapo_64k_64gpu, grpo_64k_64gpu = by_method(math_64k_64gpu)
