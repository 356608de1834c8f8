"""``gtpo-megatron plan``."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.console import Console

from gtpo_megatron.cli.command import Command
from gtpo_megatron.cli.recipe import RecipeOptions, parse
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.planner.hardware import GIB, GPUS, GPUName
from gtpo_megatron.planner.layout_plan import make_plan, plan_to_plain
from gtpo_megatron.planner.page import print_plan
from gtpo_megatron.planner.request import EXPERT_IMBALANCE, Cluster, gpus_of, request_from

EXIT_NOTHING_FITS = 1


@dataclass(frozen=True, kw_only=True)
class PlanOptions(RecipeOptions):
    """Options of ``plan`` besides the recipe's fields.

    Attributes:
        gpus: total number of GPUs; 0: those of the recipe, on whole nodes.
        gpu: GPU model, for estimated times.
        gpu_memory: GiB per GPU; 0: that of ``gpu``.
        gpus_per_node: GPUs that NVLink connects; tensor parallelism stays within them.
        rollout_gpus: GPUs that only generate, with as many engines as fit; 0: use the recipe's rollout.placement.
        host_memory: GiB per node; 0: not checked.
        mean_prompt_tokens: for estimated times; 0: an eighth of the maximum.
        mean_response_tokens: for estimated times; 0: half of the maximum.
        expert_imbalance: of a mixture of experts: copies of tokens that the busiest rank of an expert-parallel group
            receives, over the mean.
        all: show every layout.
        json: print JSON.
    """

    gpus: int = 0
    gpu: GPUName = "h100"
    gpu_memory: float = 0.0
    gpus_per_node: int = 8
    rollout_gpus: int = 0
    host_memory: float = 0.0
    mean_prompt_tokens: float = 0.0
    mean_response_tokens: float = 0.0
    expert_imbalance: float = EXPERT_IMBALANCE
    all: bool = False
    json: bool = False


def run(arguments: Sequence[str]) -> int:
    """``plan RECIPE ...``; status 1 if no layout fits."""
    options = parse("plan", PlanOptions, arguments)
    config = options.config
    if options.rollout_gpus:
        engines = max(1, options.rollout_gpus // config.rollout.tensor_parallel_size)
        config = replace(
            config,
            rollout=replace(config.rollout, placement="disaggregated", num_engines=engines),
            weight_sync=replace(config.weight_sync, transport="process_group"),
        )
    request = request_from(
        config,
        _cluster(options, config),
        mean_prompt_tokens=options.mean_prompt_tokens,
        mean_response_tokens=options.mean_response_tokens,
        expert_imbalance=options.expert_imbalance,
    )
    plan = make_plan(request)
    if options.json:
        json.dump(plan_to_plain(plan), sys.stdout, indent=1)
        sys.stdout.write("\n")
    else:
        print_plan(plan, Console(), show_all=options.all)
    return 0 if plan.fitting else EXIT_NOTHING_FITS


def _cluster(options: PlanOptions, config: RunConfig) -> Cluster:
    """The requested GPUs, or those of the recipe on whole nodes."""
    ranks, more = gpus_of(config)
    needed = ranks + (options.rollout_gpus or more)
    on_nodes = needed if needed <= options.gpus_per_node else needed + -needed % options.gpus_per_node
    gpu = GPUS[options.gpu]
    return Cluster(
        gpu=gpu,
        num_gpus=options.gpus or on_nodes,
        gpu_memory=(options.gpu_memory or gpu.memory_gib) * GIB,
        gpus_per_node=options.gpus_per_node,
        host_memory=options.host_memory * GIB,
        num_rollout_gpus=options.rollout_gpus or more,
        num_idle_gpus=0 if options.gpus else on_nodes - needed,
    )


COMMAND = Command(
    usage="""\
  plan RECIPE [--gpus N] [--gpu-memory GIB] [--any.field VALUE ...]
                    memory of every part on every GPU for every layout; needs neither GPUs nor weights""",
    run=run,
)
