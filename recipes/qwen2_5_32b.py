"""Qwen2.5-32B on 64 GPUs of 80 GB, as in the paper (arXiv 2508.04349v6, sec. 5): 128 prompts of 16 responses a step.

Each setting is marked: *paper's*, or *ours* where the paper says nothing. Every function here has the same budget and
differs from ``gtpo_64gpu`` in its algorithm only. Where the weights lie is for the run to say: ``--model.path FOLDER``.
"""

from typing import Literal

from gtpo_megatron.config.algorithm import (
    AlgorithmConfig,
    DAPOConfig,
    DynamicSamplingConfig,
    GRPOConfig,
    GRPOSConfig,
    GTPOConfig,
)
from gtpo_megatron.config.checkpoint import CheckpointConfig
from gtpo_megatron.config.cluster import ClusterConfig
from gtpo_megatron.config.data import DataConfig
from gtpo_megatron.config.evaluation import EvaluationConfig
from gtpo_megatron.config.length_penalty import GroupRelativeLengthPenalty, NoLengthPenalty, SoftOverlongPenalty
from gtpo_megatron.config.model import ModelConfig
from gtpo_megatron.config.optimizer import OptimizerConfig, UpdateConfig
from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.config.rollout import RolloutConfig, SamplingConfig, WeightSyncConfig
from gtpo_megatron.config.run import RunConfig

Method = Literal["gtpo", "grpo_s", "dapo", "grpo"]

MAX_PROMPT_TOKENS = 2048  # paper's
MAX_RESPONSE_TOKENS = 4096  # paper's
SAMPLING = SamplingConfig(temperature=1.0, top_p=1.0, top_k=0, max_response_tokens=MAX_RESPONSE_TOKENS)  # paper's

LENGTH_PENALTY = GroupRelativeLengthPenalty(
    easy_threshold=0.75,  # ours: the paper gives no value
    hard_group_penalty=NoLengthPenalty(),  # paper's "none"; its alternative is the soft overlong penalty
    correct_minority="none",  # ours: the paper says nothing of groups with no more correct than wrong responses
)
"""The paper's penalty (App. D), on."""

EVERY_GROUP = DynamicSamplingConfig(enabled=False)
"""Ours: the paper does not say that GTPO and GRPO-S replace groups without signal, as DAPO does."""


def gtpo_64gpu(*, num_steps: int = 500, seed: int = 0) -> RunConfig:
    """GTPO v6 with the paper's settings."""
    return paper_64gpu("gtpo", num_steps=num_steps, seed=seed)


def grpo_s_64gpu(*, num_steps: int = 500, seed: int = 0) -> RunConfig:
    """GRPO-S v6 with the paper's settings."""
    return paper_64gpu("grpo_s", num_steps=num_steps, seed=seed)


def dapo_64gpu(*, num_steps: int = 500, seed: int = 0) -> RunConfig:
    """DAPO, the paper's baseline: clip-higher, dynamic sampling, token-level loss, soft overlong penalty."""
    return paper_64gpu("dapo", num_steps=num_steps, seed=seed)


def grpo_64gpu(*, num_steps: int = 500, seed: int = 0) -> RunConfig:
    """GRPO without a KL term."""
    return paper_64gpu("grpo", num_steps=num_steps, seed=seed)


def paper_64gpu(method: Method = "gtpo", *, num_steps: int = 500, seed: int = 0) -> RunConfig:
    """The paper's setting with one of its methods.

    Args:
        method: which algorithm; everything else is the same for all.
        num_steps: rollout batches; ours, a little under four passes over DAPO-Math-17k.
        seed: of prompts, samples and mini-batches.
    """
    return RunConfig(
        name=f"qwen2_5_32b_{method}_64gpu",
        seed=seed,
        num_steps=num_steps,
        model=ModelConfig(
            path="Qwen/Qwen2.5-32B",  # paper's
            dtype="bfloat16",  # ours
            max_sequence_tokens=MAX_PROMPT_TOKENS + MAX_RESPONSE_TOKENS,
            head_chunk_tokens=1024,
        ),
        data=DataConfig(
            train_path="dapo-math-17k",  # ours, DAPO's set
            prompts_per_step=128,  # paper's "global batch 128", by our reading: prompts
            max_prompt_tokens=MAX_PROMPT_TOKENS,
        ),
        evaluation=EvaluationConfig(
            benchmarks=("aime24", "aime25", "math500"),  # paper's
            every_steps=20,  # ours
            samples=32,  # paper's Mean@32
            sampling=SAMPLING,
        ),
        algorithm=_algorithm(method),
        optimizer=OptimizerConfig(
            learning_rate=1e-6,  # paper's
            schedule="constant",  # ours
            warmup_updates=10,  # ours
            adam_beta1=0.9,  # ours
            adam_beta2=0.999,  # ours
            adam_eps=1e-8,  # ours
            weight_decay=0.1,  # ours
            clip_grad=1.0,  # ours
        ),
        parallel=ParallelConfig(
            num_ranks=64,  # paper's
            tensor_parallel_size=4,  # ours from here on; gtpo-megatron plan shows what it costs beside others
            pipeline_parallel_size=4,
            sequence_parallel=True,
            distributed_optimizer=True,
        ),
        rollout=RolloutConfig(
            group_size=16,  # paper's
            sampling=SAMPLING,
            dtype="bfloat16",
            tensor_parallel_size=4,
            kv_cache_mib=40960,
            max_concurrent_sequences=128,
        ),
        update=UpdateConfig(
            updates_per_rollout=1,  # paper's: every ratio is 1
            mini_batch_prompts=0,  # all of them
            micro_batch_tokens=8192,
        ),
        weight_sync=WeightSyncConfig(transport="process_group", verify_every_steps=50, logprob_gap_limit=1.0),
        checkpoint=CheckpointConfig(every_steps=20, keep=2, export_hf=True),
        cluster=ClusterConfig(mode="ray", object_store_mib=16384, start_deadline_s=1800.0, stage_deadline_s=7200.0),
    )


def _algorithm(method: Method) -> AlgorithmConfig:
    """The methods of the paper's tables."""
    match method:
        case "gtpo":
            return GTPOConfig(
                formulation="v6",  # paper's
                alpha1=1.0,  # paper's
                alpha2=0.1,  # paper's
                clip_eps_low=0.2,  # paper's
                clip_eps_high=0.28,  # paper's
                length_penalty=LENGTH_PENALTY,
                dynamic_sampling=EVERY_GROUP,
            )
        case "grpo_s":
            return GRPOSConfig(
                formulation="v6",  # paper's
                beta1=1.0,  # paper's
                beta2=0.1,  # paper's
                clip_eps_low=0.2,  # paper's
                clip_eps_high=0.28,  # paper's
                length_penalty=LENGTH_PENALTY,
                dynamic_sampling=EVERY_GROUP,
            )
        case "dapo":
            return DAPOConfig(
                clip_eps_low=0.2,  # paper's
                clip_eps_high=0.28,  # paper's
                length_penalty=SoftOverlongPenalty(
                    max_tokens=MAX_RESPONSE_TOKENS,
                    buffer_tokens=512,  # ours: the width of the paper's early version
                    applies_to="all",
                ),
                dynamic_sampling=DynamicSamplingConfig(enabled=True, max_refills=10),  # DAPO's; the limit is ours
            )
        case "grpo":
            return GRPOConfig(
                clip_eps_low=0.2,  # GRPO's
                clip_eps_high=0.2,  # GRPO's
                length_penalty=NoLengthPenalty(),  # ours
                dynamic_sampling=EVERY_GROUP,
            )
