"""The memory plan of a job on GPUs, with estimated times."""

import io
from collections.abc import Mapping
from dataclasses import dataclass, field

from rich.console import Console

from gtpo_megatron.companions.planner.hardware import GIB, GPUS
from gtpo_megatron.companions.planner.layout_plan import Plan, make_plan
from gtpo_megatron.companions.planner.page import print_plan
from gtpo_megatron.companions.planner.request import Cluster, gpus_of, request_from
from gtpo_megatron.companions.planner.search import assess
from gtpo_megatron.errors import ConfigError
from launchers.evaluation_time import estimated_s
from launchers.options import SlurmOptions

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
    ranks, more = gpus_of(options.config)
    cluster = Cluster(
        gpu=gpu,
        num_gpus=total,
        gpu_memory=int((options.gpu_memory_gib or gpu.memory_gib) * GIB),
        gpus_per_node=options.gpus_per_node,
        host_memory=options.host_memory_bytes,
        num_rollout_gpus=more,
        num_idle_gpus=total - ranks - more,
    )
    request = request_from(options.config, cluster)
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
        evaluation_s=estimated_s(request, own.layout, options.config),
    )
