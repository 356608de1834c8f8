"""Starts Ray and the processes of a run, and builds the parts of a step from them."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.errors import ConfigError, WorkerError
from gtpo_megatron.observability.timers import StageTimers
from gtpo_megatron.orchestration.collect import collect
from gtpo_megatron.orchestration.parts import StepParts, weight_layout
from gtpo_megatron.orchestration.ray_parts import ENGINE_NAME, REWARD_NAME, RayActorGroup, RayEngine, RayRewards
from gtpo_megatron.orchestration.ray_processes import EngineProcess, RankProcess, RewardProcess
from gtpo_megatron.rollout.environment import CPU_ENVIRONMENT, ENVIRONMENT
from gtpo_megatron.weights.hf_buffer import allocate, remove_name
from gtpo_megatron.weights.sync import WeightSync

logger = logging.getLogger(__name__)


@contextmanager
def ray_parts(config: RunConfig, run_folder: Path, timers: StageTimers) -> Iterator[StepParts]:
    """The parts of a step, each in processes of its own; ends the processes, and a Ray of its own, on the way out.

    Raises:
        WorkerError: a process did not come up; the message names it.
        ConfigError: the weights cannot travel between these processes.
    """
    import ray

    _start_ray(config)
    processes: dict[str, Any] = {}
    try:
        has_gpu = _has_gpus(config)
        processes = _start_processes(config, run_folder, has_gpu=has_gpu)
        ranks = [processes[_rank_name(index)] for index in range(config.parallel.num_ranks)]
        places = _bring_up(config, processes, ranks)
        deadline_s = config.cluster.stage_deadline_s
        engine = RayEngine(processes[ENGINE_NAME], deadline_s=deadline_s)
        actor = RayActorGroup(ranks, places, deadline_s=deadline_s)
        layout = weight_layout(config)
        allocate(layout)
        try:
            actor.connect_weights(layout)
            engine.connect_weights(layout)
        finally:
            remove_name(layout)
        yield StepParts(
            engine=engine,
            reward=RayRewards(processes[REWARD_NAME], deadline_s=deadline_s),
            actor=actor,
            weight_sync=WeightSync(config.weight_sync),
            timers=timers,
            logprob_gap_limit=config.weight_sync.logprob_gap_limit,
        )
    finally:
        for process in processes.values():
            ray.kill(process)
        ray.shutdown()


def _start_ray(config: RunConfig) -> None:
    import ray

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # clusters often have no way out
    cluster = config.cluster
    common = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        if cluster.address:
            ray.init(address=cluster.address, **common)
            return
        # "local": neither RAY_ADDRESS nor a head that someone else started on this machine
        ray.init(
            address="local",
            num_cpus=cluster.num_cpus,
            # Ray counts devices, whatever torch is installed
            num_gpus=torch.cuda.device_count() if torch.cuda.is_available() else 0,
            object_store_memory=cluster.object_store_mib << 20,
            include_dashboard=False,
            **common,
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        where = f"at cluster.address={cluster.address!r}" if cluster.address else "of this run"
        raise WorkerError(f"the Ray head {where} does not answer: {error}") from error


def _has_gpus(config: RunConfig) -> bool:
    """Whether the run is on GPUs at all.

    Raises:
        ConfigError: there are some, but too few for ranks and engine.
    """
    import ray

    there = int(ray.cluster_resources().get("GPU", 0))
    needed = config.parallel.num_ranks + config.rollout.tensor_parallel_size
    if 0 < there < needed:
        raise ConfigError(
            f"{config.parallel} and rollout.tensor_parallel_size={config.rollout.tensor_parallel_size} need {needed} "
            f"GPUs, Ray has {there}; take fewer ranks, or more machines"
        )
    return there > 0


def _rank_name(index: int) -> str:
    return f"rank {index}"


def _start_processes(config: RunConfig, run_folder: Path, *, has_gpu: bool) -> dict[str, Any]:
    """One actor a rank, the engine, the reward process; none is restarted by Ray, since a run resumes as a whole."""
    import ray

    common = (config, str(run_folder.resolve()), str(Path.cwd()))
    on_cpu = {} if has_gpu else CPU_ENVIRONMENT

    def start(kind: type, *, threads: int, num_gpus: int, environment: dict[str, str], **kwargs: Any) -> Any:
        variables = environment | on_cpu | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
        options = {"num_cpus": 0, "num_gpus": num_gpus if has_gpu else 0, "runtime_env": {"env_vars": variables}}
        return ray.remote(kind).options(**options).remote(*common, **kwargs)

    processes = {
        _rank_name(index): start(
            RankProcess, threads=config.cluster.threads_per_rank, num_gpus=1, environment={}, global_rank=index
        )
        for index in range(config.parallel.num_ranks)
    }
    processes[ENGINE_NAME] = start(
        EngineProcess,
        threads=config.cluster.engine_threads,
        num_gpus=config.rollout.tensor_parallel_size,
        environment=ENVIRONMENT,
    )
    processes[REWARD_NAME] = start(RewardProcess, threads=1, num_gpus=0, environment={})
    return processes


def _bring_up(config: RunConfig, processes: dict[str, Any], ranks: list[Any]) -> list[Any]:
    """Waits until every process has loaded what it needs; returns the ranks' places."""
    deadline_s = config.cluster.start_deadline_s
    identities = collect(
        {name: process.identity.remote() for name, process in processes.items()}, stage="start", deadline_s=deadline_s
    )
    for name, (host, pid) in identities.items():
        logger.info("%s: process %d on %s", name, pid, host)
    hosts = {host for name, (host, _) in identities.items() if name != REWARD_NAME}
    if len(hosts) > 1:
        raise ConfigError(
            f"weight_sync.transport='shared_memory' needs ranks and engine on one node, got {', '.join(sorted(hosts))}"
        )
    meeting = collect({"rank 0": ranks[0].meeting_point.remote()}, stage="start", deadline_s=deadline_s)["rank 0"]
    starting = {_rank_name(index): rank.start.remote(meeting) for index, rank in enumerate(ranks)}
    starting |= {name: processes[name].start.remote() for name in (ENGINE_NAME, REWARD_NAME)}
    answers = collect(starting, stage="start", deadline_s=deadline_s)
    return [answers[_rank_name(index)] for index in range(len(ranks))]
