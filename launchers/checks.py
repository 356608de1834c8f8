"""Checks of a job before its submission, without a cluster: world size, layout, memory, paths, time."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from gtpo_megatron.companions.planner.hardware import GIB, GPUS
from gtpo_megatron.companions.planner.layout_plan import Plan, make_plan
from gtpo_megatron.companions.planner.page import print_plan
from gtpo_megatron.companions.planner.request import Cluster, gpus_of, request_from
from gtpo_megatron.companions.planner.search import assess
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.config.serialize import AnyConfig
from gtpo_megatron.data.adapters import adapter_of
from gtpo_megatron.errors import ConfigError, DataError
from gtpo_megatron.orchestration.on_ray.placement import ClusterNode, Placement, place
from gtpo_megatron.run_folder.checkpoints import LATEST
from gtpo_megatron.run_folder.metrics_file import METRICS_FILE, read_metrics
from gtpo_megatron.weights.gguf.source import named_architecture
from launchers.job_folder import JobFolder, check_writable, container_image, is_image_file, mounts
from launchers.named_files import BEGINNING, is_local, named_data, named_files
from launchers.options import SlurmOptions
from launchers.walltime import check_preflight_time, check_room, estimated_s, evaluation_time, num_responses

PAGE_WIDTH = 120


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """The memory plan of the recipe's layout.

    Attributes:
        text: table of bytes by part and phase.
        step_s: estimated seconds per step; 0 without GPUs.
        evaluation_s: estimated seconds by held-out set; empty without GPUs.
    """

    text: str
    step_s: float
    evaluation_s: Mapping[str, float] = field(default_factory=dict)


def plan_memory(options: SlurmOptions) -> MemoryPlan:
    """Plans the recipe's layout on the job's GPUs.

    Raises:
        ConfigError: it does not fit; the message says where, by how much, and what would help.
    """
    if not options.gpus_per_node:
        return MemoryPlan(text="no GPUs: host memory is not planned\n", step_s=0.0)
    gpu, total = GPUS[options.gpu], options.nodes * options.gpus_per_node
    if not options.has_engines:
        return MemoryPlan(
            text="not planned for a warm start: see what training takes of a run in its layout, gtpo-megatron plan\n",
            step_s=0.0,
        )
    ranks, more = gpus_of(options.run)
    cluster = Cluster(
        gpu=gpu,
        num_gpus=total,
        gpu_memory=int((options.gpu_memory_gib or gpu.memory_gib) * GIB),
        gpus_per_node=options.gpus_per_node,
        host_memory=options.host_memory_bytes,
        num_rollout_gpus=more,
        num_idle_gpus=total - ranks - more,
    )
    request = request_from(options.run, cluster)
    assert request.own_layout is not None, "the trainer has as many GPUs as ranks"
    own = assess(request, request.own_layout)
    if not own.fits:
        better = make_plan(request)
        hint = (
            f"; {better.choice.layout} with recompute {better.choice.layout.recompute} would fit"
            if better.choice
            else ""
        )
        raise ConfigError(f"{own.layout} does not fit: {own.reason()}{hint}; see gtpo-megatron plan")
    page = io.StringIO()
    # only the recipe's layout is checked; gtpo-megatron plan compares layouts
    plan = Plan(request=request, own=own, fitting=[own], misses=[], suggestions=[])
    print_plan(plan, Console(file=page, width=PAGE_WIDTH))
    return MemoryPlan(
        text="\n".join(line.rstrip() for line in page.getvalue().splitlines()) + "\n",
        step_s=own.time.total,
        evaluation_s=estimated_s(request, own.layout, options.run),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedJob:
    """The result of the checks.

    Attributes:
        placement: the node of every process.
        memory: the memory plan.
        remarks: sentences about what could not be checked.
    """

    placement: Placement
    memory: MemoryPlan
    remarks: list[str]


def check_job(job: JobFolder, options: SlurmOptions) -> CheckedJob:
    """Runs all checks.

    Raises:
        ConfigError: the job would fail.
    """
    options.check()
    remarks = check_paths(options.config, job.run_dir, is_dry_run=options.dry_run)
    check_writable(job.run_dir)
    placement = check_world(options)
    check_layout(options.run)
    if options.has_engines:
        check_transport(options.run, placement)
    check_container(job, options)
    memory = plan_memory(options)
    rows = known_rows(job.run_dir)
    if options.preflight:
        check_preflight_time(options.time, seconds=options.preflight_s)
        check_skipped(options.skip)
        return CheckedJob(placement=placement, memory=memory, remarks=remarks)
    step_s, source = known_step_s(rows, memory)
    evaluation = evaluation_time(rows, memory.evaluation_s, options.run) if options.has_engines else None
    check_room(options.time, stop_before_s=options.stop_before_s, step_s=step_s, source=source, evaluation=evaluation)
    if not step_s:
        remarks.append(
            f"how long a step takes is not known yet: --stop-before-s {options.stop_before_s} must be longer than one, "
            f"and than the measurement of the largest held-out set"
        )
    if evaluation is None:
        return CheckedJob(placement=placement, memory=memory, remarks=remarks)
    responses = num_responses(options.run)
    if unknown := [label for label, num in responses.items() if not num and not evaluation.by_set.get(label)]:
        remarks.append(
            f"how many problems {', '.join(unknown)} has is not known before it is read, so --time and --stop-before-s "
            f"were not checked against its measurement"
        )
    return CheckedJob(placement=placement, memory=memory, remarks=remarks)


def check_skipped(names: Sequence[str]) -> None:
    """Checks that the preflight has checks of these names, where its libraries are installed.

    Raises:
        ConfigError: it has not.
    """
    if not names:
        return
    try:
        from gtpo_megatron.companions.preflight.catalogue import CHECKS  # takes seconds: it imports torch
        from gtpo_megatron.companions.preflight.runner import chosen_checks
    except ImportError:
        return  # they may be in the container only, where the preflight checks its own options
    chosen_checks(CHECKS, only=(), skip=names)


def check_paths(config: AnyConfig, run_dir: Path, *, is_dry_run: bool) -> list[str]:
    """Checks that local files exist and named data sets are known; in a dry run the model may be a name.

    Returns:
        Remarks about files that could not be checked.

    Raises:
        ConfigError: a file is missing, or a name is of no data set.
    """
    goes_on = (run_dir / "checkpoints" / LATEST).exists()
    for name, path in named_files(config):
        if not path.exists() and not (goes_on and name == BEGINNING):
            raise ConfigError(f"{name}={path}: no such file or folder here; jobs need it where every node sees it")
    for _, dataset in named_data(config):
        if not (dataset.path or dataset.generated or dataset.repository):
            adapter_of(dataset.name)
    if not is_local(config.model.path):
        missing = f"model.path={config.model.path} is a name of the hub; jobs need the folder of its weights"
        if not is_dry_run:
            raise ConfigError(f"{missing}: --model.path FOLDER")
        return [f"{missing}: --model.path FOLDER when you submit"]
    return []


def check_world(options: SlurmOptions) -> Placement:
    """Checks that ranks and engines fit on the nodes, and that no node is empty.

    Returns:
        The placement.

    Raises:
        ConfigError: too few GPUs, more nodes than the run can use, or a tensor-parallel group over two nodes.
    """
    run, gpus = options.run, options.gpus_per_node
    parallel, rollout = run.parallel, run.rollout
    tensor, total = parallel.tensor_parallel_size, options.nodes * gpus
    if gpus and tensor > gpus:
        raise ConfigError(
            f"parallel.tensor_parallel_size={tensor} exceeds --gpus-per-node {gpus}: its ranks talk in every layer and "
            f"must be on one node"
        )
    if gpus and gpus % tensor:
        raise ConfigError(
            f"parallel.tensor_parallel_size={tensor} does not divide --gpus-per-node {gpus}: a group would lie on two "
            f"nodes; choose a divisor"
        )
    ranks, more = gpus_of(run) if options.has_engines else (parallel.num_ranks, 0)
    num_engines = rollout.num_engines if options.has_engines else 0
    parts = f"{parallel} and {num_engines} engine(s) of {rollout.ranks_per_engine}" if num_engines else str(parallel)
    if gpus and total < ranks + more:
        shared = f"; or {ranks} that both share: --rollout.placement colocated"
        raise ConfigError(
            f"--nodes {options.nodes} of --gpus-per-node {gpus} are {total} GPUs; {parts} "
            f"need {ranks + more}{shared if more else ', which both share' if num_engines else ''}"
        )
    placement = place(
        parallel,
        num_engines=num_engines,
        engine_gpus=rollout.ranks_per_engine,
        engine_nodes=rollout.nodes_per_engine,
        nodes=planned_nodes(options),
        colocated=rollout.placement == "colocated",
    )
    used = {node.node_id for node in (*placement.ranks, *(node for engine in placement.engines for node in engine))}
    if len(used) < options.nodes:
        raise ConfigError(
            f"--nodes {options.nodes}: {options.nodes - len(used)} would be empty, since {parts} "
            f"fit on {len(used)}; take --nodes {len(used)} or more ranks"
        )
    return placement


def check_transport(config: RunConfig, placement: Placement) -> None:
    """Checks the transport: shared memory needs every shard on the engine's node, NCCL needs separate GPUs.

    Raises:
        ConfigError: it does not.
    """
    colocated = config.rollout.placement == "colocated"
    transport = config.transport(has_gpus=placement.has_gpus)
    if transport == "process_group" and colocated and placement.has_gpus:
        raise ConfigError(
            "weight_sync.transport='process_group' with rollout.placement='colocated': NCCL refuses two processes on "
            "one GPU; use --weight-sync.transport relay"
        )
    if transport != "shared_memory":
        return
    parallel = config.parallel
    tensor, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    ranks_per_stage = parallel.num_ranks // stages
    shards = tensor * stages
    for engine in dict.fromkeys(node for nodes in placement.engines for node in nodes):
        here = {
            (rank % tensor, rank // ranks_per_stage)
            for rank, node in enumerate(placement.ranks)
            if node.node_id == engine.node_id
        }
        if len(here) < shards:
            raise ConfigError(
                f"weight_sync.transport='shared_memory': {shards - len(here)} of {shards} shards of the "
                f"model are on other nodes than the engine ({engine.host}); use "
                f"--weight-sync.transport {'relay' if colocated else 'process_group'}"
            )


def planned_nodes(options: SlurmOptions) -> list[ClusterNode]:
    """The nodes that the job requests."""
    return [
        ClusterNode(
            node_id=str(index),
            host=f"node {index}",
            num_gpus=options.gpus_per_node,
            num_cpus=options.cpus_per_task,  # 0: Slurm's own number, which nothing that is checked here depends on
        )
        for index in range(options.nodes)
    ]


def check_layout(config: RunConfig) -> None:
    """Checks that the layout divides the model; without local weights the memory plan checks known models.

    Raises:
        ConfigError: it does not.
    """
    if is_local(config.model.path):
        named_architecture(config.model.path).check_layout(config.parallel)


def check_container(job: JobFolder, options: SlurmOptions) -> None:
    """Checks that an image file exists, and that all needed folders can be mounted.

    Raises:
        ConfigError: it is not, or cannot.
    """
    if not options.container:
        return
    if is_image_file(options) and not Path(container_image(options)).is_file():
        raise ConfigError(
            f"--container {options.container}: no such file; import an image with `enroot import`, or name a registry's"
        )
    mounts(job, options)


def known_rows(run_dir: Path) -> list[dict[str, Any]]:
    """The run's metrics so far; empty if it has not begun or cannot be read."""
    try:
        return read_metrics(run_dir / METRICS_FILE)
    except DataError:
        return []


def known_step_s(rows: Sequence[Mapping[str, Any]], memory: MemoryPlan) -> tuple[float, str]:
    """Seconds per step and their source: this run's own steps, else the memory plan."""
    seconds = [row["timing/step_s"] for row in rows[-10:] if row.get("timing/step_s")]
    if seconds:
        return median(seconds), "median of this run's last steps"
    return memory.step_s, "estimate of gtpo-megatron plan"
