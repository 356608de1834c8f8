"""A Qwen2 of 1.07 million parameters learns arithmetic: two Megatron ranks (TP 2), one vLLM engine, two CPU cores.

``grpo_s``, ``dapo``, ``grpo``, ``grpo_kl`` and ``distill`` have the prompts, updates and steps of ``gtpo`` and differ
from it in their algorithm only; DAPO's dynamic sampling samples more. The others have a model, a task or adapters of
their own; ``sft`` and ``sft_lora`` are warm starts (``gtpo-megatron sft``).
Learning rate and batch are made for a model of this size; the algorithm's settings are the paper's (arXiv
2508.04349v6, sec. 5).
"""

import dataclasses
from pathlib import Path

from gtpo_megatron.config.adapter import AdapterConfig
from gtpo_megatron.config.algorithm import (
    AlgorithmConfig,
    DAPOConfig,
    DistillConfig,
    GRPOConfig,
    GRPOSConfig,
    GTPOConfig,
    ReferenceKLConfig,
    TeacherConfig,
)
from gtpo_megatron.config.algorithm.base import SoftOverlongPenalty
from gtpo_megatron.config.cluster import ClusterConfig
from gtpo_megatron.config.environment import EnvironmentConfig
from gtpo_megatron.config.model import ModelConfig
from gtpo_megatron.config.optimizer import OptimizerConfig, UpdateConfig
from gtpo_megatron.config.output import CheckpointConfig, LoggingConfig
from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.config.problems import DataConfig, EvaluationConfig
from gtpo_megatron.config.reward import RewardConfig
from gtpo_megatron.config.rollout import GivenLimits, RolloutConfig, SamplingConfig, WeightSyncConfig
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.config.sft import ConversationData, SftConfig

ASSETS = Path(__file__).resolve().parent / "assets"
"""Data and models of these recipes, which come with them in a wheel."""

MAX_PROMPT_TOKENS = 96
MAX_RESPONSE_TOKENS = 128
FLOAT32_LIMITS = GivenLimits(scaled_nats=5e-5, bound_nats=5e-4, beyond_frac=0.0)
"""Measured over 40 steps: mean 7e-7, 99% of the tokens 5e-6, all of them 5.1e-5; a push that went wrong: 1e-2."""

SAMPLING = SamplingConfig(temperature=1.0, top_p=1.0, top_k=0, max_response_tokens=MAX_RESPONSE_TOKENS)


def gtpo(*, num_steps: int = 40, seed: int = 0) -> RunConfig:
    """GTPO v6 with the paper's settings."""
    return _tiny_cpu("tiny_cpu_gtpo", GTPOConfig(), num_steps=num_steps, seed=seed)


def gtpo_lora(*, num_steps: int = 40, seed: int = 0) -> RunConfig:
    """GTPO with low-rank adapters over frozen weights."""
    full = gtpo(num_steps=num_steps, seed=seed)
    return dataclasses.replace(
        full,
        name="tiny_cpu_gtpo_lora",
        adapter=AdapterConfig(rank=16, alpha=32.0),
        optimizer=dataclasses.replace(full.optimizer, learning_rate=5e-3),
    )


def grpo_s(*, num_steps: int = 40, seed: int = 0) -> RunConfig:
    """GRPO-S v6 with the paper's settings."""
    return _tiny_cpu("tiny_cpu_grpo_s", GRPOSConfig(), num_steps=num_steps, seed=seed)


def dapo(*, num_steps: int = 40, seed: int = 0) -> RunConfig:
    """DAPO: clip-higher, token-level loss, soft overlong penalty over the last quarter of the length limit."""
    algorithm = DAPOConfig(
        length_penalty=SoftOverlongPenalty(
            max_tokens=MAX_RESPONSE_TOKENS, buffer_tokens=MAX_RESPONSE_TOKENS // 4, applies_to="all"
        ),
    )
    return _tiny_cpu("tiny_cpu_dapo", algorithm, num_steps=num_steps, seed=seed)


def grpo(*, num_steps: int = 40, seed: int = 0) -> RunConfig:
    """GRPO without a KL term."""
    return _tiny_cpu("tiny_cpu_grpo", GRPOConfig(), num_steps=num_steps, seed=seed)


def grpo_kl(*, num_steps: int = 40, seed: int = 0) -> RunConfig:
    """GRPO as published: with its KL term against the first weights, ``k3`` in the loss."""
    algorithm = GRPOConfig(reference_kl=ReferenceKLConfig(coef=0.04))  # DeepSeekMath's coefficient
    return _tiny_cpu("tiny_cpu_grpo_kl", algorithm, num_steps=num_steps, seed=seed)


def distill(*, num_steps: int = 40, seed: int = 0) -> RunConfig:
    """On-policy distillation: a teacher of another family and shape scores the tokens that the student samples.

    The teacher is ``moe_gtpo``'s model, which answers twice as many problems correctly as the student. Rewards only
    measure.
    """
    base = gtpo(num_steps=num_steps, seed=seed)
    return dataclasses.replace(
        base,
        name="tiny_cpu_distill",
        algorithm=DistillConfig(),
        parallel=dataclasses.replace(base.parallel, sequence_parallel=True),  # which a teacher with experts needs
        teacher=TeacherConfig(path=str(ASSETS / "tiny_qwen3_moe")),
    )


def moe_gtpo(*, num_steps: int = 40, seed: int = 0) -> RunConfig:
    """GTPO on a Qwen3-MoE of 1.86 million parameters: 8 experts per layer, on two ranks, with routing replay.

    Its model is ``recipes/assets/tiny_qwen3_moe``.
    """
    dense = gtpo(num_steps=num_steps, seed=seed)
    return dataclasses.replace(
        dense,
        name="tiny_cpu_moe_gtpo",
        model=dataclasses.replace(dense.model, path=str(ASSETS / "tiny_qwen3_moe")),
        parallel=ParallelConfig(num_ranks=2, expert_parallel_size=2),
        rollout=dataclasses.replace(dense.rollout, returns_routing=True),
        update=dataclasses.replace(dense.update, routing_replay="rollout"),
    )


def code_gtpo(*, num_steps: int = 50, seed: int = 0) -> RunConfig:
    """GTPO on short programs, run in a sandbox on tests that the prompt does not show.

    Its model is ``recipes/assets/tiny_coder``; the problems, ``recipes/assets/programs``, show four values of a
    function.
    """
    base = gtpo(num_steps=num_steps, seed=seed)
    sampling = dataclasses.replace(SAMPLING, max_response_tokens=64)
    return dataclasses.replace(
        base,
        name="tiny_cpu_code_gtpo",
        model=dataclasses.replace(base.model, path=str(ASSETS / "tiny_coder"), max_sequence_tokens=160),
        data=dataclasses.replace(base.data, train_path=str(ASSETS / "programs" / "train.jsonl")),
        evaluation=dataclasses.replace(
            base.evaluation, path=str(ASSETS / "programs" / "heldout.jsonl"), num_problems=128, sampling=sampling
        ),
        algorithm=dataclasses.replace(base.algorithm, success_threshold=1.0),
        rollout=dataclasses.replace(base.rollout, sampling=sampling),
        reward=RewardConfig(
            function="gtpo_megatron.rewards.code_tests:code_tests", num_workers=2, timeout_s=30.0, memory_limit_mib=2048
        ),
    )


def tool_gtpo(*, num_steps: int = 40, seed: int = 0) -> RunConfig:
    """GTPO on conversations of two turns: the same arithmetic, with a calculator that the policy may call.

    Its model is ``recipes/assets/tiny_tool_user``, which calls it for one problem in six and otherwise guesses.
    """
    base = gtpo(num_steps=num_steps, seed=seed)
    return dataclasses.replace(
        base,
        name="tiny_cpu_tool_gtpo",
        model=dataclasses.replace(base.model, path=str(ASSETS / "tiny_tool_user")),
        environment=EnvironmentConfig(name="recipes.calculator:Calculator", num_workers=1, max_turns=4),
    )


def sft(*, num_steps: int = 32, seed: int = 0) -> SftConfig:
    """A warm start: one epoch of 1,024 worked solutions of the training problems, from which ``gtpo`` goes on.

    They combine two terms at a time, where the model has learnt to leap; learning rate and batch are ours.
    """
    base = gtpo(seed=seed)
    return SftConfig(
        name="tiny_cpu_sft",
        seed=seed,
        num_steps=num_steps,
        model=base.model,
        data=ConversationData(
            train_path=str(ASSETS / "arithmetic" / "solutions.jsonl"),
            heldout_path=str(ASSETS / "arithmetic" / "heldout_solutions.jsonl"),
            rows_per_step=32,
        ),
        optimizer=dataclasses.replace(base.optimizer, learning_rate=1e-3, schedule="linear", weight_decay=0.0),
        parallel=base.parallel,
        heldout_every_steps=8,
        micro_batch_tokens=base.update.micro_batch_tokens,
        checkpoint=dataclasses.replace(base.checkpoint, every_steps=16),
        logging=base.logging,
        cluster=base.cluster,
    )


def sft_lora(*, num_steps: int = 32, seed: int = 0) -> SftConfig:
    """The same with low-rank adapters over frozen weights, from which ``gtpo_lora`` goes on."""
    full = sft(num_steps=num_steps, seed=seed)
    return dataclasses.replace(
        full,
        name="tiny_cpu_sft_lora",
        adapter=AdapterConfig(rank=16, alpha=32.0),
        optimizer=dataclasses.replace(full.optimizer, learning_rate=5e-3),
    )


def _tiny_cpu(name: str, algorithm: AlgorithmConfig, *, num_steps: int, seed: int) -> RunConfig:
    return RunConfig(
        name=name,
        seed=seed,
        num_steps=num_steps,
        model=ModelConfig(
            path=str(ASSETS / "tiny_qwen2"),
            dtype="float32",  # so that sampler and trainer can be compared closely
            max_sequence_tokens=MAX_PROMPT_TOKENS + MAX_RESPONSE_TOKENS,
            head_chunk_tokens=2048,
        ),
        data=DataConfig(
            train_path=str(ASSETS / "arithmetic" / "train.jsonl"),
            prompts_per_step=32,
            max_prompt_tokens=MAX_PROMPT_TOKENS,
        ),
        evaluation=EvaluationConfig(
            path=str(ASSETS / "arithmetic" / "heldout.jsonl"),
            every_steps=20,
            num_problems=256,
            samples=8,
            sampling=SAMPLING,
        ),
        algorithm=algorithm,
        optimizer=OptimizerConfig(
            learning_rate=2e-4,  # the paper's 1e-6 is for 7 B and 32 B parameters
            schedule="constant",
            warmup_updates=4,
            adam_beta1=0.9,
            adam_beta2=0.99,  # 40 updates are too few for a memory of 1,000
            adam_eps=1e-8,
            weight_decay=0.0,
            clip_grad=1.0,
        ),
        parallel=ParallelConfig(num_ranks=2, tensor_parallel_size=2),
        rollout=RolloutConfig(
            group_size=8,
            sampling=SAMPLING,
            dtype="float32",
            kv_cache_mib=256,
            max_concurrent_sequences=256,
        ),
        reward=RewardConfig(num_workers=1, timeout_s=10.0),
        update=UpdateConfig(updates_per_rollout=1, mini_batch_prompts=0, micro_batch_tokens=8192),
        weight_sync=WeightSyncConfig(verify_every_steps=10, mismatch=FLOAT32_LIMITS),
        checkpoint=CheckpointConfig(every_steps=10, keep=2, export_hf=True),
        logging=LoggingConfig(tensorboard=True),
        cluster=ClusterConfig(
            num_cpus=2,
            object_store_mib=128,
            threads_per_rank=1,
            start_deadline_s=180.0,
            stage_deadline_s=120.0,
        ),
    )
