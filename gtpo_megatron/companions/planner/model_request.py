"""The setting that a model is planned in when no recipe is named: the paper's (arXiv 2508.04349v6, sec. 5)."""

from pathlib import Path
from typing import Any

from gtpo_megatron.companions.planner.engine import divides_engine
from gtpo_megatron.companions.planner.known_models import find_shape
from gtpo_megatron.companions.planner.layout import Layout
from gtpo_megatron.config.algorithm import GTPOConfig
from gtpo_megatron.config.model import ModelConfig
from gtpo_megatron.config.optimizer import OptimizerConfig, UpdateConfig
from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.config.problems import DataConfig, EvaluationConfig
from gtpo_megatron.config.rollout import RolloutConfig, SamplingConfig
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.weights.model_shape import ModelShape

PROMPT_TOKENS, RESPONSE_TOKENS = 2048, 4096
CACHE_SHARE = 0.5
"""Of a GPU, for keys and values while it generates."""
WEIGHTS_SHARE = 0.25
"""Of a GPU, that an engine's weights may take: the trainer's are there too."""
WEIGHT_BYTES = 2


def names_model(name: str) -> bool:
    """Whether a text names a model and no recipe: a model folder, its ``config.json``, or a name of the hub."""
    if ":" in name or name.endswith((".yaml", ".yml")):
        return False
    return "/" in name or name == "config.json" or (Path(name) / "config.json").is_file()


def recipe_options(config: RunConfig, layout: Layout, base: RunConfig) -> list[str]:
    """Options that give a recipe the layout and the sizes of a planned run, where its own are others.

    Args:
        config: that was planned.
        layout: of its trainer.
        base: the recipe.
    """
    parallel = {
        "num_ranks": layout.num_ranks,
        "tensor_parallel_size": layout.tensor,
        "pipeline_parallel_size": layout.pipeline,
        "virtual_pipeline_size": layout.virtual,
        "last_stage_layers": layout.last_layers,
        "context_parallel_size": layout.context,
        "expert_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor,
        "sequence_parallel": layout.sequence_parallel,
        "distributed_optimizer": layout.distributed_optimizer,
    }
    rollout = (
        *("num_engines", "tensor_parallel_size", "pipeline_parallel_size", "nodes_per_engine"),
        *("kv_cache_mib", "max_concurrent_sequences"),
    )
    wanted: list[tuple[str, Any, str, Any]] = [("parallel", base.parallel, *each) for each in parallel.items()]
    wanted += [("rollout", base.rollout, name, getattr(config.rollout, name)) for name in rollout]
    wanted += [
        ("model", base.model, "recompute", layout.recompute),
        ("model", base.model, "max_sequence_tokens", config.model.max_sequence_tokens),
        ("data", base.data, "max_prompt_tokens", config.data.max_prompt_tokens),
        ("update", base.update, "micro_batch_tokens", config.update.micro_batch_tokens),
        ("rollout.sampling", base.rollout.sampling, "max_response_tokens", config.rollout.sampling.max_response_tokens),
        (
            "evaluation.sampling",
            base.evaluation.sampling,
            "max_response_tokens",
            config.evaluation.sampling.max_response_tokens,
        ),
    ]
    return [_option(f"{section}.{name}", value) for section, own, name, value in wanted if getattr(own, name) != value]


def _option(path: str, value: object) -> str:
    section, _, name = path.replace("_", "-").rpartition(".")
    if isinstance(value, bool):
        return f"--{section}.{'' if value else 'no-'}{name}"
    return f"--{section}.{name} {value}"


def paper_setting(model: str, *, num_gpus: int, gpu_memory_gib: float, gpus_per_node: int) -> RunConfig:
    """A run of the paper's size on GPUs that sampler and trainer use in turns; its trainer's layout is to be found.

    Args:
        model: folder, or name on the hub.
        num_gpus: in all.
        gpu_memory_gib: of one.
        gpus_per_node: that NVLink connects; an engine that needs more has a stage on each node.

    Raises:
        ConfigError: the model is not known.
    """
    shape = find_shape(model)
    on_node = min(num_gpus, gpus_per_node)
    engine = _engine_size(shape, num_gpus=on_node, gpu_memory_gib=gpu_memory_gib)
    stages = 1
    if engine == on_node:
        room = WEIGHTS_SHARE * gpu_memory_gib * on_node * 2**30
        counts = [count for count in range(1, num_gpus // on_node + 1) if num_gpus // on_node % count == 0]
        stages = next((count for count in counts if shape.num_parameters * WEIGHT_BYTES <= count * room), counts[-1])
    response_tokens = min(RESPONSE_TOKENS, shape.max_positions - shape.max_positions // 3)
    prompt_tokens = min(PROMPT_TOKENS, shape.max_positions - response_tokens)
    sampling = SamplingConfig(max_response_tokens=response_tokens)
    return RunConfig(
        name="the paper's setting",
        num_steps=500,
        model=ModelConfig(path=model, max_sequence_tokens=prompt_tokens + response_tokens),
        data=DataConfig(train_path="dapo-math-17k", prompts_per_step=128, max_prompt_tokens=prompt_tokens),
        evaluation=EvaluationConfig(benchmarks=("aime24",), sampling=sampling),
        algorithm=GTPOConfig(),
        optimizer=OptimizerConfig(learning_rate=1e-6),
        parallel=ParallelConfig(num_ranks=num_gpus, distributed_optimizer=True),
        rollout=RolloutConfig(
            group_size=16,
            sampling=sampling,
            placement="colocated",
            dtype="bfloat16",
            num_engines=num_gpus // (engine * stages),
            tensor_parallel_size=engine,
            pipeline_parallel_size=stages,
            nodes_per_engine=stages,
            kv_cache_mib=int(CACHE_SHARE * gpu_memory_gib * 1024),
            max_concurrent_sequences=256 if engine == 1 else 128,
        ),
        update=UpdateConfig(micro_batch_tokens=max(8192, prompt_tokens + response_tokens)),
    )


def _engine_size(shape: ModelShape, *, num_gpus: int, gpu_memory_gib: float) -> int:
    """GPUs of an engine: as few as leave room for a cache."""
    sizes = [size for size in range(1, num_gpus + 1) if num_gpus % size == 0 and divides_engine(shape, size)]
    weights_gib = shape.num_parameters * WEIGHT_BYTES / 2**30
    return next((size for size in sizes if weights_gib / size <= WEIGHTS_SHARE * gpu_memory_gib), sizes[-1])
