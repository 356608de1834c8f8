"""What the processes of a run take of a machine's memory where they run on its CPUs."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gtpo_megatron.config.environment import EnvironmentConfig
from gtpo_megatron.config.model import ELEMENT_BYTES
from gtpo_megatron.config.rollout import RolloutConfig
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.machine_memory import memory
from gtpo_megatron.rollout.cache_size import cpu_cache_mib
from gtpo_megatron.weights.adapter_shapes import num_parameters
from gtpo_megatron.weights.architecture import Architecture
from gtpo_megatron.weights.config_json import read_architecture

logger = logging.getLogger(__name__)

_GIB = 2**30

CACHES = "key-value caches"

ENGINE_GIB, RANK_GIB, RUN_GIB = 0.9, 0.6, 1.2
"""What processes take on a CPU without a model, as PSS of the tiny recipe (vLLM 0.32, Megatron 0.16, torch 2.13): one
of an engine, a rank, and all others of a run together (driver, Ray, rewards)."""

ENVIRONMENT_GIB = 0.03
"""PSS of an environment's worker with its supervisor, before anything of the environment's own; docs/planning.md has
the command that measures it."""

TRAINED_BYTES = {"float32": 16, "bfloat16": 18}
"""Of a parameter of each dtype in the trainer: weights, float32 gradients, two moments of Adam, a float32 copy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """Memory of this machine that some processes will take at least.

    Attributes:
        by: user of the memory, for messages.
        num_bytes: bytes of all of them.
        lowered_by: options that lower it; "": none does.
    """

    by: str
    num_bytes: int
    lowered_by: str = ""


def memory_needed(config: RunConfig, architecture: Architecture, *, free_bytes: int) -> list[Taken]:
    """What a run on this machine's CPUs takes at least, by part; activations are not among them.

    Args:
        config: configuration of the run.
        architecture: architecture of its model.
        free_bytes: free memory of this machine, for caches that are sized by it.
    """
    parallel, elements = config.parallel, architecture.num_parameters
    share = elements // (parallel.tensor_parallel_size * parallel.pipeline_parallel_size)
    rank_bytes = int(RANK_GIB * _GIB) + _share_bytes(config, architecture, share) + _teacher_bytes(config)
    has_replicas = parallel.data_parallel_size > 1 and parallel.expert_data_parallel_size > 1
    return [
        *engines_need(
            config.rollout,
            architecture,
            max_tokens=config.model.max_sequence_tokens,
            free_bytes=free_bytes,
            where="rollout",
        ),
        Taken(
            by="ranks",
            num_bytes=parallel.num_ranks * rank_bytes,
            lowered_by="parallel.num_ranks" if has_replicas else "",
        ),
        Taken(by="driver, Ray and rewards", num_bytes=int(RUN_GIB * _GIB)),
        *environments_need(config.environment, num_engines=config.rollout.num_engines),
    ]


def _share_bytes(config: RunConfig, architecture: Architecture, share: int) -> int:
    """Of a rank's share of the weights, with gradients and optimizer; of frozen weights these are of the adapters.

    Of frozen weights that replicas share it keeps a part, and has two layers at once.
    """
    if not config.adapter.is_on:
        return share * TRAINED_BYTES[config.model.dtype]
    parallel = config.parallel
    ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    adapters = num_parameters(architecture, config.adapter) // ranks
    if config.adapter.shard_frozen:
        layers = architecture.num_layers / parallel.pipeline_parallel_size
        share = int(share * min(1, 1 / (parallel.data_parallel_size * parallel.context_parallel_size) + 2 / layers))
    return share * ELEMENT_BYTES[config.model.dtype] + adapters * TRAINED_BYTES[config.model.dtype]


def _teacher_bytes(config: RunConfig) -> int:
    """Of a rank's share of the teacher's weights; 0 without one, and where the base of adapters is it."""
    if not config.has_own_teacher:
        return 0
    ranks = config.parallel.tensor_parallel_size * config.parallel.pipeline_parallel_size
    return read_architecture(Path(config.teacher.path)).num_parameters // ranks * ELEMENT_BYTES[config.model.dtype]


def environments_need(environment: EnvironmentConfig, *, num_engines: int) -> list[Taken]:
    """What the workers of an environment take at least; empty without one."""
    if not environment.name:
        return []
    num_bytes = num_engines * environment.num_workers * int(ENVIRONMENT_GIB * _GIB)
    return [Taken(by="environments", num_bytes=num_bytes, lowered_by="environment.num_workers")]


def engines_need(
    rollout: RolloutConfig, architecture: Architecture, *, max_tokens: int, free_bytes: int, where: str
) -> list[Taken]:
    """What engines on this machine's CPUs take, by part.

    Args:
        rollout: the engines.
        architecture: architecture of the model.
        max_tokens: length of the longest prompt and response.
        free_bytes: free memory of this machine, for caches that are sized by it.
        where: prefix of the engines' options.
    """
    workers = rollout.num_engines * rollout.ranks_per_engine
    cache = cpu_cache_mib(rollout, architecture, max_tokens=max_tokens, free_bytes=free_bytes)
    # twice: as they were pushed, and packed for oneDNN's products; of FP8 that is more than there is
    weights = 2 * architecture.num_parameters * ELEMENT_BYTES[rollout.activation_dtype] * rollout.num_engines
    return [
        Taken(
            by="engines",
            num_bytes=workers * int(ENGINE_GIB * _GIB) + weights,
            lowered_by=f"{where}.num_engines" if rollout.num_engines > 1 else "",
        ),
        Taken(
            by=CACHES,
            num_bytes=workers * cache << 20,
            lowered_by=f"{where}.kv_cache_mib or {where}.max_concurrent_sequences"
            if rollout.kv_cache_mib is None
            else f"{where}.kv_cache_mib",
        ),
    ]


def said_by_part(needed: Sequence[Taken]) -> str:
    """Such as: ``3.6 GiB of memory (engines 0.9, key-value caches 0.2, ...)``."""
    parts = ", ".join(f"{one.by} {one.num_bytes / _GIB:.1f}" for one in needed)
    return f"{sum(one.num_bytes for one in needed) / _GIB:.1f} GiB of memory ({parts})"


def what_lowers(needed: Sequence[Taken]) -> str:
    """The options that lower the largest part of those that have any."""
    return max((one for one in needed if one.lowered_by), key=lambda one: one.num_bytes).lowered_by


def check_free(rollout: RolloutConfig, needed: Sequence[Taken], *, where: str) -> tuple[str, bool]:
    """Compares what will be taken with the memory that is free now.

    Args:
        rollout: the engines.
        needed: what is taken, such as ``memory_needed`` has it.
        where: prefix of the engines' options.

    Returns:
        A line that says both and what lowers it; and whether enough is free.

    Raises:
        ConfigError: the caches that were asked for are larger than what is free, so that no engine would start.
    """
    total, free = memory()
    machine = f"this machine's {total / _GIB:.1f} GiB of memory"
    cache = sum(one.num_bytes for one in needed if one.by == CACHES)
    if rollout.kv_cache_mib is not None and cache >= free:
        raise ConfigError(
            f"{where}.kv_cache_mib={rollout.kv_cache_mib}: the caches of all engines are {cache / _GIB:.1f} GiB, and "
            f"{free / _GIB:.1f} GiB of {machine} are free; lower it, or leave it out: then it is sized by what is free"
        )
    taken = sum(one.num_bytes for one in needed)
    said = (
        f"takes at least {said_by_part(needed)}; {free / _GIB:.1f} GiB of {machine} are free; a lower "
        f"{what_lowers(needed)} takes less"
    )
    if taken <= free:
        return said, True
    return f"{said}, as does a smaller model: the system may end a process of this or of another run", False


def check_memory(config: RunConfig, architecture: Architecture) -> None:
    """Says what a run on this machine's CPUs will take of the memory that is free; warns if that is too little.

    Raises:
        ConfigError: the engines' caches alone do.
    """
    needed = memory_needed(config, architecture, free_bytes=memory()[1])
    said, is_enough = check_free(config.rollout, needed, where="rollout")
    logger.log(logging.INFO if is_enough else logging.WARNING, "the run %s", said)
