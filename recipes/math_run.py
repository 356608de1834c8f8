"""The common settings of the recipes for mathematics: the paper's (arXiv 2508.04349v6, sec. 5), for any model and GPUs.

Each value is marked: *paper's*, or *ours* where the paper says nothing. A recipe adds a model, its GPUs and, for models
that think before they answer, a longer response.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, update_wrapper
from typing import Concatenate, Literal, ParamSpec

from gtpo_megatron.config.adapter import AdapterConfig
from gtpo_megatron.config.algorithm import (
    AlgorithmConfig,
    DAPOConfig,
    DynamicSamplingConfig,
    GRPOConfig,
    GRPOSConfig,
    GTPOConfig,
)
from gtpo_megatron.config.algorithm.base import (
    GroupRelativeLengthPenalty,
    NoLengthPenalty,
    SoftOverlongPenalty,
)
from gtpo_megatron.config.cluster import ClusterConfig
from gtpo_megatron.config.configuration import JsonObject
from gtpo_megatron.config.model import ModelConfig
from gtpo_megatron.config.optimizer import OptimizerConfig, UpdateConfig
from gtpo_megatron.config.output import CheckpointConfig
from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.config.problems import DAPO_TEMPLATE, DataConfig, EvaluationConfig
from gtpo_megatron.config.reward import RewardConfig
from gtpo_megatron.config.rollout import RolloutConfig, SamplingConfig, WeightSyncConfig
from gtpo_megatron.config.run import RunConfig

Method = Literal["gtpo", "grpo_s", "dapo", "grpo"]
P = ParamSpec("P")

MAX_PROMPT_TOKENS = 2048  # paper's
MAX_RESPONSE_TOKENS = 4096  # paper's
LONG_RESPONSE_TOKENS = 32768  # ours
LONGEST_RESPONSE_TOKENS = 65536  # ours
THINKING_RESPONSE_TOKENS = 16384  # ours, for models that think first: at the paper's length few would get to an answer

THINKING = {"enable_thinking": True}
"""Ours, and what Qwen3's chat template does by default: with False every prompt ends in an empty thought. The templates
of Qwen3's Instruct-2507 and Thinking-2507 have no such option: ``--data.template-options '{}'`` for those."""

TRAINING_SET = "dapo-math-17k"  # ours, DAPO's set; a name stands for a pinned commit, NAME=FILE for a local copy
BENCHMARKS = ("aime24", "aime25", "math500", "amc23", "minerva", "olympiadbench")  # the first three are the paper's

GRADERS = 16
"""Ours: grading processes. LaTeX takes 5 to 50 ms to read (docs/math_answers.md); all GPUs wait for 2,048 answers."""

GRADERS_PER_GPU = 8
"""Ours, the most: a GPU's share of a node has as many cores, and limits of time are by the clock."""

LENGTH_PENALTY = GroupRelativeLengthPenalty(
    easy_threshold=0.75,  # ours: the paper gives no value
    hard_group_penalty=NoLengthPenalty(),  # paper's "none"; its alternative is the soft overlong penalty
    correct_minority="none",  # ours: the paper does not define n <= m
)
"""The paper's penalty (App. D), on."""

EVERY_GROUP = DynamicSamplingConfig(enabled=False)
"""Ours: the paper does not say that GTPO and GRPO-S replace groups without signal, as DAPO does."""

OPTIMIZER = OptimizerConfig(
    learning_rate=1e-6,  # paper's
    schedule="constant",  # ours
    warmup_updates=10,  # ours
    adam_beta1=0.9,  # ours
    adam_beta2=0.999,  # ours
    adam_eps=1e-8,  # ours
    weight_decay=0.1,  # ours
    clip_grad=1.0,  # ours
)


ADAPTER_LEARNING_RATE = 1e-5
"""Ours: ten times full training's, see docs/choosing.md."""
ADAPTER = AdapterConfig(rank=32, alpha=32.0)
"""Ours: on every projection but those of experts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OnGPUs:
    """The layout of a model on GPUs that ranks and engines share: ours, from ``gtpo-megatron plan``.

    Attributes:
        num_gpus: total number of GPUs.
        tensor_parallel_size: of the trainer.
        pipeline_parallel_size: of the trainer.
        last_stage_layers: of its last stage; None: as many as the others have.
        context_parallel_size: of the trainer.
        expert_parallel_size: of the trainer; 1 for a dense model.
        expert_tensor_parallel_size: of the trainer.
        recompute: activations that the trainer makes again.
        engine_size: GPUs per vLLM engine that share its layers; the engines use all GPUs.
        engine_stages: such groups of an engine, each with some of the layers.
        engine_nodes: nodes of an engine.
        shares_experts_whole: the ranks of an engine hold whole experts, in place of a part of every expert.
        max_concurrent_sequences: sequences that an engine decodes together.
        kv_cache_gib: on each GPU.
        adapter: what is trained in the place of all weights.
    """

    num_gpus: int
    tensor_parallel_size: int
    pipeline_parallel_size: int = 1
    last_stage_layers: int | None = None
    context_parallel_size: int = 1
    expert_parallel_size: int = 1
    expert_tensor_parallel_size: int = 1
    recompute: Literal["none", "selective", "full"] = "none"
    engine_size: int
    engine_stages: int = 1
    engine_nodes: int = 1
    shares_experts_whole: bool = False
    max_concurrent_sequences: int
    kv_cache_gib: int = 40
    adapter: AdapterConfig = AdapterConfig()

    @property
    def parallel(self) -> ParallelConfig:
        """The trainer's layout."""
        return ParallelConfig(
            num_ranks=self.num_gpus,
            tensor_parallel_size=self.tensor_parallel_size,
            pipeline_parallel_size=self.pipeline_parallel_size,
            last_stage_layers=self.last_stage_layers,
            context_parallel_size=self.context_parallel_size,
            expert_parallel_size=self.expert_parallel_size,
            expert_tensor_parallel_size=self.expert_tensor_parallel_size,
            sequence_parallel=self.tensor_parallel_size > 1,
            distributed_optimizer=True,
        )


def by_method(
    recipe: Callable[Concatenate[Method, P], RunConfig],
) -> tuple[Callable[P, RunConfig], Callable[P, RunConfig], Callable[P, RunConfig], Callable[P, RunConfig]]:
    """A recipe for each method, in the order of ``Method``, so that the command line can name it."""
    gtpo, grpo_s = partial(recipe, "gtpo"), partial(recipe, "grpo_s")
    dapo, grpo = partial(recipe, "dapo"), partial(recipe, "grpo")
    for method in (gtpo, grpo_s, dapo, grpo):
        update_wrapper(method, recipe)
    return gtpo, grpo_s, dapo, grpo


def math_run(
    model: str,
    method: Method,
    on: OnGPUs,
    *,
    num_steps: int,
    seed: int,
    max_response_tokens: int = MAX_RESPONSE_TOKENS,
    stage_deadline_s: float = 7200.0,
    template_options: JsonObject | None = None,
) -> RunConfig:
    """One run; with another method only name and algorithm differ.

    Args:
        model: name on the hub; the run gives the weights: ``--model.path FOLDER``.
        method: one of the paper's tables.
        on: the GPUs.
        num_steps: rollout batches.
        seed: of prompts, samples and mini-batches.
        max_response_tokens: a longer response is cut.
        stage_deadline_s: twice the estimate for the largest benchmark, at least; ours.
        template_options: of the model's chat template; None: its defaults.
    """
    lora = "lora_" if on.adapter.is_on else ""
    length = "" if max_response_tokens == MAX_RESPONSE_TOKENS else f"{max_response_tokens // 1024}k_"
    short_name = model.partition("/")[2].lower().replace(".", "_").replace("-", "_")
    sampling = SamplingConfig(temperature=1.0, top_p=1.0, top_k=0, max_response_tokens=max_response_tokens)  # paper's
    return RunConfig(
        name=f"{short_name}_{method}_{length}{lora}{on.num_gpus}gpu",
        seed=seed,
        num_steps=num_steps,
        model=ModelConfig(
            path=model,
            dtype="bfloat16",  # ours
            max_sequence_tokens=MAX_PROMPT_TOKENS + max_response_tokens,
            recompute=on.recompute,
        ),
        data=DataConfig(
            train_path=TRAINING_SET,
            prompts_per_step=128,  # paper's "global batch 128", by our reading: prompts
            max_prompt_tokens=MAX_PROMPT_TOKENS,
            template_options=template_options or {},
        ),
        evaluation=EvaluationConfig(
            benchmarks=BENCHMARKS,
            every_steps=100,  # ours: a measurement takes as many responses as 24 steps
            samples=32,  # paper's Mean@32
            sampling=sampling,
            prompt_template=DAPO_TEMPLATE,  # ours: the instruction of the training prompts
        ),
        reward=RewardConfig(num_workers=min(GRADERS, GRADERS_PER_GPU * on.num_gpus)),
        algorithm=algorithm(method, max_response_tokens=max_response_tokens),
        adapter=on.adapter,
        optimizer=replace(OPTIMIZER, learning_rate=ADAPTER_LEARNING_RATE) if on.adapter.is_on else OPTIMIZER,
        parallel=on.parallel,
        rollout=RolloutConfig(
            group_size=16,  # paper's
            sampling=sampling,
            placement="colocated",  # ours from here on
            num_engines=on.num_gpus // (on.engine_size * on.engine_stages),
            dtype="bfloat16",
            tensor_parallel_size=on.engine_size,
            pipeline_parallel_size=on.engine_stages,
            nodes_per_engine=on.engine_nodes,
            expert_parallel=on.shares_experts_whole,
            kv_cache_mib=on.kv_cache_gib << 10,
            max_concurrent_sequences=on.max_concurrent_sequences,
        ),
        update=UpdateConfig(
            updates_per_rollout=1,  # paper's: every ratio is 1
            mini_batch_prompts=0,  # all of them
            micro_batch_tokens=max(8192, MAX_PROMPT_TOKENS + max_response_tokens),
        ),
        weight_sync=WeightSyncConfig(
            deadline_s=600.0,
            verify_every_steps=50,
        ),
        checkpoint=CheckpointConfig(every_steps=20, keep=2, export_hf=True),
        cluster=ClusterConfig(
            mode="ray", object_store_mib=16384, start_deadline_s=1800.0, stage_deadline_s=stage_deadline_s
        ),
    )


def algorithm(method: Method, *, max_response_tokens: int) -> AlgorithmConfig:
    """The methods of the paper's tables.

    ``gtpo`` and ``grpo_s`` are v6; ``dapo`` has clip-higher, dynamic sampling, a token-level loss and the soft overlong
    penalty; ``grpo`` has no KL term (``--algorithm.reference-kl.coef 0.04`` is GRPO's).
    """
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
                    max_tokens=max_response_tokens,
                    buffer_tokens=max_response_tokens // 8,  # ours: 512 of 4,096 are the paper's early version's
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
