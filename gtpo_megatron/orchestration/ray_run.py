"""Starts Ray and the processes of a run, and builds the parts of a step from them."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gtpo_megatron.actor.place import RankPlace
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.observability.profiling import nsight_options
from gtpo_megatron.observability.timers import StageTimers
from gtpo_megatron.orchestration.collect import collect
from gtpo_megatron.orchestration.parts import StepParts
from gtpo_megatron.orchestration.placement import Node, Placement, place
from gtpo_megatron.orchestration.ray_cluster import join_cluster, ray_nodes
from gtpo_megatron.orchestration.ray_parts import (
    ENGINE_NAME,
    REWARD_NAME,
    RayActorGroup,
    RayEngine,
    RayRewards,
    RayTransfer,
)
from gtpo_megatron.orchestration.ray_processes import EngineProcess, RankProcess, RewardProcess
from gtpo_megatron.orchestration.weight_link import connect
from gtpo_megatron.rollout.environment import CPU_ENVIRONMENT, ENVIRONMENT
from gtpo_megatron.weights.sync import WeightSync

logger = logging.getLogger(__name__)


@contextmanager
def ray_parts(config: RunConfig, run_folder: Path, timers: StageTimers) -> Iterator[StepParts]:
    """The parts of a step, each in processes of its own; ends the processes, and a Ray of its own, on the way out.

    Raises:
        WorkerError: a process did not come up; the message names it.
        ConfigError: the processes do not fit on the cluster, or the weights cannot travel between them.
    """
    import ray

    join_cluster(config.cluster)
    processes: dict[str, Any] = {}
    try:
        placement = place(config.parallel, engine_gpus=config.rollout.tensor_parallel_size, nodes=ray_nodes())
        _log_placement(placement)
        processes = _start_processes(config, run_folder, placement)
        ranks = [processes[_rank_name(index)] for index in range(config.parallel.num_ranks)]
        places = _bring_up(config, processes, ranks)
        deadline_s = config.cluster.stage_deadline_s
        engine = RayEngine(
            processes[ENGINE_NAME],
            host=placement.engine.host,
            num_workers=config.rollout.tensor_parallel_size,
            deadline_s=deadline_s,
        )
        actor = RayActorGroup(ranks, places, hosts=[node.host for node in placement.ranks], deadline_s=deadline_s)
        connect(config, run_folder, actor, engine, has_gpus=placement.has_gpus)
        yield StepParts(
            engine=engine,
            reward=RayRewards(processes[REWARD_NAME], deadline_s=deadline_s),
            actor=actor,
            weight_sync=WeightSync(config.weight_sync, RayTransfer(actor, engine, deadline_s=deadline_s)),
            timers=timers,
            logprob_gap_limit=config.weight_sync.logprob_gap_limit,
        )
    finally:
        for process in processes.values():
            ray.kill(process)
        ray.shutdown()


def _log_placement(placement: Placement) -> None:
    by_node: dict[str, list[str]] = {}
    for index, node in enumerate(placement.ranks):
        by_node.setdefault(node.host, []).append(str(index))
    ranks = "; ".join(f"{host}: {', '.join(indices)}" for host, indices in by_node.items())
    logger.info("ranks on %s; engine on %s", ranks, placement.engine.host)


def _rank_name(index: int) -> str:
    return f"rank {index}"


def _start_processes(config: RunConfig, run_folder: Path, placement: Placement) -> dict[str, Any]:
    """One actor a rank, the engine, the reward process; none is restarted by Ray, since a run resumes as a whole."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    common = (config, str(run_folder.resolve()), str(Path.cwd()))
    on_cpu = {} if placement.has_gpus else CPU_ENVIRONMENT

    def start(
        kind: type,
        node: Node,
        *,
        threads: int,
        num_gpus: int,
        environment: dict[str, str],
        nsight: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> Any:
        variables = environment | on_cpu | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
        under_nsight = {"nsight": nsight} if nsight and placement.has_gpus else {}
        options = {
            "num_cpus": 0,
            "num_gpus": num_gpus if placement.has_gpus else 0,
            "runtime_env": {"env_vars": variables, **under_nsight},
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node.node_id, soft=False),
        }
        return ray.remote(kind).options(**options).remote(*common, **kwargs)

    processes = {
        _rank_name(index): start(
            RankProcess,
            node,
            threads=config.cluster.threads_per_rank,
            num_gpus=1,
            environment={},
            nsight=nsight_options(config.profile, rank=index, run_folder=run_folder.resolve()),
            global_rank=index,
        )
        for index, node in enumerate(placement.ranks)
    }
    processes[ENGINE_NAME] = start(
        EngineProcess,
        placement.engine,
        threads=config.cluster.engine_threads,
        num_gpus=config.rollout.tensor_parallel_size,
        environment=ENVIRONMENT,
    )
    processes[REWARD_NAME] = start(RewardProcess, placement.reward, threads=1, num_gpus=0, environment={})
    return processes


def _bring_up(config: RunConfig, processes: dict[str, Any], ranks: list[Any]) -> list[RankPlace]:
    """Waits until every process has loaded what it needs; returns the ranks' places."""
    deadline_s = config.cluster.start_deadline_s
    identities = collect(
        {name: process.identity.remote() for name, process in processes.items()}, stage="start", deadline_s=deadline_s
    )
    for name, (host, pid) in identities.items():
        logger.info("%s: process %d on %s", name, pid, host)
    meeting = collect({"rank 0": ranks[0].meeting_point.remote()}, stage="start", deadline_s=deadline_s)["rank 0"]
    starting = {_rank_name(index): rank.start.remote(meeting) for index, rank in enumerate(ranks)}
    starting |= {name: processes[name].start.remote() for name in (ENGINE_NAME, REWARD_NAME)}
    answers = collect(starting, stage="start", deadline_s=deadline_s)
    return [answers[_rank_name(index)] for index in range(len(ranks))]
