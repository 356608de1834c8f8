"""The environment variables of a run's processes, which libraries read when they are loaded; imports none of them."""

from collections.abc import Mapping

from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.orchestration.on_ray.placement import Placement
from gtpo_megatron.rollout.engine_arguments import CPU_ENVIRONMENT, engine_environment

RANK_GPU_ENVIRONMENT = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
"""Of a rank on a GPU: micro-batches of many lengths would leave holes, for which the planner has 5% with this only.
Engines do without: vLLM's memory that sleeps is of a pool that cannot have it."""


def rank_variables(config: RunConfig, *, has_gpus: bool) -> dict[str, str]:
    """Of a rank."""
    own = RANK_GPU_ENVIRONMENT if has_gpus else {}
    return _with_threads(own, config.cluster.threads_per_rank, has_gpus=has_gpus)


def reward_variables(*, has_gpus: bool) -> dict[str, str]:
    """Of the reward process."""
    return _with_threads({}, 1, has_gpus=has_gpus)


def engine_variables(config: RunConfig, placement: Placement, index: int) -> dict[str, str]:
    """Of an engine."""
    own = engine_environment(config.rollout, has_gpus=placement.has_gpus)
    return _with_threads(own, engine_threads(config, placement, index), has_gpus=placement.has_gpus)


def _with_threads(variables: Mapping[str, str], threads: int, *, has_gpus: bool) -> dict[str, str]:
    on_cpu = {} if has_gpus else CPU_ENVIRONMENT
    return {**variables, **on_cpu, **({"OMP_NUM_THREADS": str(threads)} if threads else {})}


def engine_threads(config: RunConfig, placement: Placement, index: int) -> int:
    """Threads of an engine's process: as asked for; else, on CPUs, its share of its node's cores.

    Ray gives a process one thread that says nothing. Ranks wait while engines sample, unless steps overlap, and have
    their cores to themselves then. 0 leaves it to vLLM, on GPUs.
    """
    if config.cluster.engine_threads or placement.has_gpus:
        return config.cluster.engine_threads
    node = placement.engines[index][0]
    cores = node.num_cpus
    if config.rollout.max_staleness:
        cores -= placement.ranks.count(node) * config.cluster.threads_per_rank
    parts = sum(engine.count(node) for engine in placement.engines)
    return max(1, cores // (parts * config.rollout.ranks_per_node))
