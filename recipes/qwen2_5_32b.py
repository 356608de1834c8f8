"""Qwen2.5-32B: the paper's setting on 64 GPUs (arXiv 2508.04349v6, sec. 5); on 8, with adapters; and published DAPO.

``recipes/math_run.py`` has what is not said here, each value marked as the paper's or ours.
"""

from dataclasses import replace

from gtpo_megatron.config.algorithm import DAPOConfig, DynamicSamplingConfig
from gtpo_megatron.config.algorithm.base import SoftOverlongPenalty
from gtpo_megatron.config.run import RunConfig
from recipes.code_run import code_run
from recipes.math_run import ADAPTER, Method, OnGPUs, by_method, math_run

MODEL = "Qwen/Qwen2.5-32B"  # paper's

ON_64_GPUS = OnGPUs(
    num_gpus=64,  # paper's
    tensor_parallel_size=4,
    pipeline_parallel_size=4,
    engine_size=4,
    max_concurrent_sequences=128,
)


LORA_ON_8_GPUS = OnGPUs(
    num_gpus=8,
    tensor_parallel_size=4,
    engine_size=4,
    max_concurrent_sequences=128,
    kv_cache_gib=32,
    adapter=ADAPTER,
)


def paper_64gpu(method: Method = "gtpo", *, num_steps: int = 500, seed: int = 0) -> RunConfig:
    """The paper's setting with one of its methods; 500 steps, ours, are a little under four passes over the data."""
    return math_run(MODEL, method, ON_64_GPUS, num_steps=num_steps, seed=seed)


def code_64gpu(method: Method = "gtpo", *, num_steps: int = 300, seed: int = 0) -> RunConfig:
    """Programs on the paper's GPUs: TACO, graded by its tests in a sandbox (``recipes/code_run.py``)."""
    return code_run(MODEL, method, ON_64_GPUS, num_steps=num_steps, seed=seed)


def lora_8gpu(method: Method = "gtpo", *, num_steps: int = 500, seed: int = 0) -> RunConfig:
    """The paper's batch on one node, with low-rank adapters over the frozen weights."""
    return math_run(MODEL, method, LORA_ON_8_GPUS, num_steps=num_steps, seed=seed)


gtpo_64gpu, grpo_s_64gpu, dapo_64gpu, grpo_64gpu = by_method(paper_64gpu)
gtpo_lora_8gpu, grpo_s_lora_8gpu, dapo_lora_8gpu, grpo_lora_8gpu = by_method(lora_8gpu)
gtpo_code_64gpu, grpo_s_code_64gpu, dapo_code_64gpu, grpo_code_64gpu = by_method(code_64gpu)

DAPO_UPDATES_A_STEP = 16  # DAPO's: mini-batches of 512 responses


def dapo_published_128gpu(*, num_steps: int = 500, seed: int = 0) -> RunConfig:
    """DAPO as in arXiv 2503.14476, sec. 4.1, and in its published script; ``dapo_64gpu`` has the paper's budget.

    DAPO's: marked so. Script's: from the command that its authors published, where the article says nothing. Paper's:
    the other settings, as for every method here.
    """
    config = math_run(
        MODEL,
        "dapo",
        OnGPUs(
            num_gpus=128,  # script's: 16 nodes of 8
            tensor_parallel_size=4,  # ours from here on
            pipeline_parallel_size=4,
            context_parallel_size=2,
            engine_size=4,  # script's
            max_concurrent_sequences=128,  # ours
        ),
        num_steps=num_steps,
        seed=seed,
        max_response_tokens=20480,  # DAPO's: 16,384 and the 4,096 over which the penalty grows
    )
    return replace(
        config,
        name="qwen2_5_32b_dapo_published_128gpu",
        data=replace(config.data, prompts_per_step=512),  # DAPO's; 16 responses each, as the paper's
        algorithm=DAPOConfig(
            clip_eps_low=0.2,  # DAPO's
            clip_eps_high=0.28,  # DAPO's
            length_penalty=SoftOverlongPenalty(max_tokens=20480, buffer_tokens=4096, applies_to="all"),  # DAPO's
            dynamic_sampling=DynamicSamplingConfig(enabled=True, max_refills=10),  # DAPO's; the limit is ours
        ),
        optimizer=replace(
            config.optimizer,  # DAPO's: 1e-6, constant; script's: weight decay 0.1, gradients clipped at 1
            warmup_updates=20 * DAPO_UPDATES_A_STEP,  # DAPO's: 20 rollout steps
        ),
        update=replace(
            config.update,
            updates_per_rollout=DAPO_UPDATES_A_STEP,
            mini_batch_prompts=512 // DAPO_UPDATES_A_STEP,
        ),
        evaluation=replace(
            config.evaluation,
            benchmarks=("aime24",),  # DAPO's, 32 times
            every_steps=20,  # ours
            sampling=replace(config.evaluation.sampling, top_p=0.7),  # DAPO's
        ),
    )
