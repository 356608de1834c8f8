"""Starts Ray and the processes of a run, and builds the stages of a step."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from gtpo_megatron.batch import PromptBatch, RewardBatch
from gtpo_megatron.config.rollout import WeightSyncConfig
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.observability.timers import StageTimers
from gtpo_megatron.orchestration.on_ray.cluster import join_cluster, leave_lost_ray, ray_nodes
from gtpo_megatron.orchestration.on_ray.collect import Deadline, checked_while_waiting, collect, explained
from gtpo_megatron.orchestration.on_ray.engines import RayEngines
from gtpo_megatron.orchestration.on_ray.fleet import EngineFleet, engine_names
from gtpo_megatron.orchestration.on_ray.placement import Placement, place_run
from gtpo_megatron.orchestration.on_ray.ranks import RayRanks, RayTransfer
from gtpo_megatron.orchestration.on_ray.start import (
    REWARD_NAME,
    ProcessStarter,
    bring_up,
    bring_up_engine,
    end_in_order,
    rank_name,
)
from gtpo_megatron.orchestration.on_ray.worker_servers import WorkerServers
from gtpo_megatron.orchestration.run_supervisor import RunSupervisor
from gtpo_megatron.orchestration.stages.processes import OnProcesses, RunProcesses, ignore_processes
from gtpo_megatron.orchestration.stages.rollouts import RolloutHandle
from gtpo_megatron.orchestration.stages.stages import Grade, MemorySharing, Stages
from gtpo_megatron.orchestration.stages.trainer import Trainer
from gtpo_megatron.orchestration.stages.weight_link import connect
from gtpo_megatron.weights.push.sync import WeightSync

logger = logging.getLogger(__name__)


@contextmanager
def ray_stages(
    config: RunConfig,
    run_folder: Path,
    timers: StageTimers,
    *,
    on_processes: OnProcesses = ignore_processes,
    servers: WorkerServers | None = None,
) -> Iterator[Stages]:
    """The stages of a step, each in processes of its own; ends the processes, and a private Ray, at exit.

    Args:
        config: configuration of the run.
        run_folder: folder of the processes' logs.
        timers: timers of the steps.
        on_processes: called before any process loads a model.
        servers: make workers; None: each imports for itself.

    Raises:
        WorkerError: a process did not start; the message names it.
        ConfigError: the processes do not fit on the cluster, or no transport connects them.
    """
    with _supervised(run_folder, timers) as (supervisor, processes):
        starter, placement, reach = _start(
            config, run_folder, timers, supervisor, processes, on_processes, has_engines=True, servers=servers
        )
        deadline_s = config.cluster.stage_deadline_s
        trainer = Trainer(reach)

        def connect_all(sync: WeightSyncConfig = config.weight_sync) -> None:
            unattended = RayEngines(fleet, push_again=None)
            connect(replace(config, weight_sync=sync), trainer, unattended, has_gpus=placement.has_gpus)

        fleet = _fleet(config, placement, starter, processes, supervisor, open_link=connect_all)
        timers.starting("connecting ranks and engines for pushes")
        fleet.reconnect()
        transfer = RayTransfer(reach, fleet, deadline_s=deadline_s)

        def open_link(sync: WeightSyncConfig) -> WeightSync:
            connect_all(sync)
            return WeightSync(sync, transfer)

        weight_sync = WeightSync(config.weight_sync, transfer, before_push=fleet.replace_dead)
        engine = RayEngines(fleet, push_again=lambda version: weight_sync.push(version=version))
        yield Stages(
            engine=engine,
            grade=_grading(config, processes),
            trainer=trainer,
            weight_sync=weight_sync,
            memory_sharing=MemorySharing(
                trainer, engine, is_colocated=config.rollout.placement == "colocated", timers=timers
            ),
            timers=timers,
            open_link=open_link,
        )
        supervisor.closing()
        end_in_order(processes, engine_names(config.rollout.num_engines))


@contextmanager
def ray_trainer(
    config: RunConfig,
    run_folder: Path,
    timers: StageTimers,
    *,
    on_processes: OnProcesses = ignore_processes,
    servers: WorkerServers | None = None,
) -> Iterator[Trainer]:
    """The ranks alone, each in a process of its own: nothing is sampled and nothing graded; else as ``ray_stages``.

    Raises:
        WorkerError: a process did not start; the message names it.
        ConfigError: the ranks do not fit on the cluster.
    """
    with _supervised(run_folder, timers) as (supervisor, processes):
        *_, reach = _start(
            config, run_folder, timers, supervisor, processes, on_processes, has_engines=False, servers=servers
        )
        yield Trainer(reach)


def _start(
    config: RunConfig,
    run_folder: Path,
    timers: StageTimers,
    supervisor: RunSupervisor,
    processes: dict[str, Any],
    on_processes: OnProcesses,
    *,
    has_engines: bool,
    servers: WorkerServers | None,
) -> tuple[ProcessStarter, Placement, RayRanks]:
    """Joins Ray, and starts the ranks; with engines these too, and the reward process."""
    deadline = Deadline(config.cluster.start_deadline_s)
    address = config.cluster.address
    timers.starting(f"joining Ray at {address}" if address else "starting Ray")
    join_cluster(
        config.cluster,
        deadline=deadline,
        temp_folder=supervisor.temp_folder,
        servers=servers,
        joined=lambda num: timers.starting("waiting for nodes", f"{num} of {config.cluster.num_nodes}"),
    )
    placement = place_run(config, ray_nodes(), has_engines=has_engines)
    _log_placement(placement)
    starter = ProcessStarter(
        config, run_folder, placement, processes, temp_folder=supervisor.temp_folder, servers=servers
    )
    starter.ranks()
    if has_engines:
        starter.engines_and_rewards(deadline)
    began = time.monotonic()
    on_processes(_run_processes(processes, placement))
    deadline.extend(time.monotonic() - began)
    ranks = [processes[rank_name(index)] for index in range(config.parallel.num_ranks)]
    coordinates = bring_up(config, processes, ranks, deadline=deadline, met=supervisor.knows, starting=timers.starting)
    reach = RayRanks(
        ranks,
        coordinates,
        hosts=[node.host for node in placement.ranks],
        deadline_s=config.cluster.stage_deadline_s,
    )
    return starter, placement, reach


@contextmanager
def _supervised(run_folder: Path, timers: StageTimers) -> Iterator[tuple[RunSupervisor, dict[str, Any]]]:
    """A supervisor, and the processes, which end with the block; an error in it is explained by a death."""
    import ray

    supervisor = RunSupervisor(run_folder)
    timers.tell_also(supervisor.stage)
    processes: dict[str, Any] = {}
    try:
        with checked_while_waiting(supervisor.check):
            yield supervisor, processes
    except Exception as error:
        better = explained(error, supervisor.cause())
        if better is error:
            raise
        raise better from error
    finally:
        supervisor.closing()
        if supervisor.has_lost_ray:
            leave_lost_ray()  # the supervisor ends what is left of it
        else:
            for process in processes.values():
                ray.kill(process)
            ray.shutdown()
        supervisor.end()


def _grading(config: RunConfig, processes: Mapping[str, Any]) -> Grade:
    if config.environment.name:
        # imports what a run without an environment leaves to its reward process
        from gtpo_megatron.orchestration.stages.environment_rewards import environment_rewards

        return environment_rewards
    process, deadline_s = processes[REWARD_NAME], config.cluster.stage_deadline_s

    def grade(rollouts: RolloutHandle, prompts: PromptBatch) -> RewardBatch:
        call = process.run.remote(lambda grader: grader.grade(rollouts, prompts))
        rewards: RewardBatch = collect({REWARD_NAME: call}, stage="reward", deadline_s=deadline_s)[REWARD_NAME]
        return rewards

    return grade


def _fleet(
    config: RunConfig,
    placement: Placement,
    starter: ProcessStarter,
    processes: dict[str, Any],
    supervisor: RunSupervisor,
    *,
    open_link: Callable[[], None],
) -> EngineFleet:
    names = engine_names(config.rollout.num_engines)

    def restart(index: int) -> Any:
        deadline = Deadline(config.cluster.start_deadline_s)
        starter.engine(index, deadline)
        bring_up_engine(names[index], processes[names[index]], deadline=deadline, met=supervisor.knows)
        return processes[names[index]]

    return EngineFleet(
        [processes[name] for name in names],
        hosts=[
            node.host for engine in placement.engines for node in engine for _ in range(config.rollout.ranks_per_node)
        ],
        rollout=config.rollout,
        has_environment=bool(config.environment.name),
        restart=restart,
        deadline_s=config.cluster.stage_deadline_s,
        open_link=open_link,
        expect_end=supervisor.expects,
    )


def _run_processes(processes: Mapping[str, Any], placement: Placement) -> RunProcesses:
    """The processes, of which replaced engines are replaced in ``processes``."""
    ranks = tuple(rank_name(index) for index in range(len(placement.ranks)))
    engines = tuple(engine_names(len(placement.engines))) if placement.engines else ()
    nodes = (*placement.ranks, *(engine[0] for engine in placement.engines))

    def call(stage: str, functions: Mapping[str, Callable[[Any], Any]], deadline_s: float) -> dict[str, Any]:
        calls = {name: processes[name].run.remote(function) for name, function in functions.items()}
        return collect(calls, stage=stage, deadline_s=deadline_s)

    hosts = {name: node.host for name, node in zip((*ranks, *engines), nodes, strict=True)}
    return RunProcesses(ranks=ranks, engines=engines, hosts=hosts, call=call)


def _log_placement(placement: Placement) -> None:
    by_node: dict[str, list[str]] = {}
    for index, node in enumerate(placement.ranks):
        by_node.setdefault(node.host, []).append(str(index))
    ranks = "; ".join(f"{host}: {', '.join(indices)}" for host, indices in by_node.items())
    engines = ", ".join(" + ".join(node.host for node in engine) for engine in placement.engines)
    logger.info("ranks on %s; engines on %s", ranks, engines or "none")
