"""``gtpo-megatron plan``."""

import importlib
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path

from pydantic import NonNegativeInt, PositiveInt
from rich.console import Console

from gtpo_megatron.cli.arguments import parse_options
from gtpo_megatron.cli.command import Command
from gtpo_megatron.cli.recipe import RecipeOptions, load_recipe, parse
from gtpo_megatron.companions.planner.correction import read_correction
from gtpo_megatron.companions.planner.cpu_memory import cpu_memory
from gtpo_megatron.companions.planner.hardware import GIB, GPUS, GPUName
from gtpo_megatron.companions.planner.known_models import untuned
from gtpo_megatron.companions.planner.layout_plan import Plan, make_plan, plan_to_plain
from gtpo_megatron.companions.planner.model_request import names_model, paper_setting, recipe_options
from gtpo_megatron.companions.planner.page import print_plan
from gtpo_megatron.companions.planner.request import (
    EXPERT_IMBALANCE,
    Cluster,
    PlanRequest,
    gpus_of,
    request_from,
    with_engines_apart,
)
from gtpo_megatron.companions.planner.search import anything_fits
from gtpo_megatron.config.configuration import configuration
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.errors import ConfigError

EXIT_NOTHING_FITS = 1
BASE_RECIPE = "recipes.qwen2_5_7b:gtpo_8gpu"
"""In the paper's setting, as a model without a recipe is planned."""


@configuration
class PlanOptions(RecipeOptions):
    """Options of ``plan`` besides the recipe's fields.

    Attributes:
        gpus: total number of GPUs; 0: those of the recipe, on whole nodes.
        gpu: GPU model, for estimated times.
        gpu_memory: GiB per GPU; 0: that of ``gpu``.
        gpus_per_node: GPUs that NVLink connects; tensor parallelism stays within them.
        rollout_gpus: GPUs that only generate, with as many engines as fit; 0: use the recipe's rollout.placement.
        host_memory: GiB per node; 0: not checked.
        mean_prompt_tokens: mean length, for estimated times; 0: an eighth of the maximum.
        mean_response_tokens: mean length, for estimated times; 0: half of the maximum.
        expert_imbalance: in a mixture of experts, copies of tokens that the busiest rank of an expert-parallel group
            receives, over the mean.
        correction: a preflight's plan_correction.json, what it measured beyond the plan; empty: none.
        nodes: what a step costs on so many nodes, failures included, instead of the page of layouts; several may be
            given: 8 32 128.
        gpu_hours_between_failures: hours of one GPU with its share of node and network, for nodes; 0: 50,700, as
            published.
        response_tail: 99th percentile of response lengths over their median, for nodes; 0: 8.
        all: show every layout.
        json: print JSON.
    """

    gpus: NonNegativeInt = 0
    gpu: GPUName = "h100"
    gpu_memory: float = 0.0
    gpus_per_node: PositiveInt = 8
    rollout_gpus: NonNegativeInt = 0
    host_memory: float = 0.0
    mean_prompt_tokens: float = 0.0
    mean_response_tokens: float = 0.0
    expert_imbalance: float = EXPERT_IMBALANCE
    correction: str = ""
    nodes: tuple[int, ...] = ()
    gpu_hours_between_failures: float = 0.0
    response_tail: float = 0.0
    all: bool = False
    json: bool = False


def run(arguments: Sequence[str]) -> int:
    """``plan RECIPE|MODEL ...``; status 1 if no layout fits."""
    options = parse("plan", PlanOptions, arguments, load=lambda name: _named(name, arguments[1:]))
    config = options.config
    is_model = names_model(arguments[0])
    if options.nodes:
        return _scale(options, is_model=is_model)
    if options.rollout_gpus:
        config = with_engines_apart(config, options.rollout_gpus)
    request = _request(options, config, _own_cluster(options, config), is_model=is_model)
    plan = make_plan(request)
    if is_model:
        plan = _with_next(plan, options, typed=_fields_of(arguments[1:]))
    on_cpu = cpu_memory(config, request)
    if options.json:
        json.dump(plan_to_plain(plan) | {"on_cpu": [asdict(one) for one in on_cpu]}, sys.stdout, indent=1)
        sys.stdout.write("\n")
    else:
        print_plan(plan, Console(), on_cpu=on_cpu, show_all=options.all)
    return 0 if plan.fitting else EXIT_NOTHING_FITS


def _request(options: PlanOptions, config: RunConfig, cluster: Cluster, *, is_model: bool) -> PlanRequest:
    """What is planned: the recipe on these GPUs, and all that the options say of it.

    Args:
        options: options of the command.
        config: configuration of the recipe; engines may have been given GPUs of their own.
        cluster: the GPUs.
        is_model: a model was named and no recipe, so that a layout is to be found and none is given.
    """
    request = request_from(
        config,
        cluster,
        mean_prompt_tokens=options.mean_prompt_tokens,
        mean_response_tokens=options.mean_response_tokens,
        expert_imbalance=options.expert_imbalance,
    )
    if options.correction:
        request = replace(request, correction=read_correction(Path(options.correction)).added_bytes)
    return replace(request, own_layout=None) if is_model else request


def _fields_of(arguments: Sequence[str]) -> list[str]:
    """Of the arguments those that are fields of a recipe, each with its values."""
    taken: list[str] = []
    is_field = False
    for argument in arguments:
        if argument.startswith("--"):
            is_field = "." in argument.partition("=")[0]
        if is_field:
            taken.append(argument)
    return taken


def _with_next(plan: Plan, options: PlanOptions, *, typed: Sequence[str]) -> Plan:
    """The plan of a model with what to do next: the command that trains so, or a recipe with adapters that fits."""
    if plan.choice is not None:
        more = recipe_options(options.config, plan.choice.layout, load_recipe(BASE_RECIPE))
        command = f"gtpo-megatron train {BASE_RECIPE} --model.path FOLDER"
        return replace(
            plan, next_command=" ".join([command, *typed, *(one for one in more if one.split()[0] not in typed)])
        )
    fitting = [
        f"{name}: low-rank adapters, fits as it is"
        for name in _adapter_recipes(plan.request.model)
        if anything_fits(_request(options, load_recipe(name), plan.request.cluster, is_model=True))
    ]
    return replace(plan, suggestions=[*plan.suggestions, *fitting])


def _adapter_recipes(model: str) -> list[str]:
    """Recipes of this model with adapters, whose module has the model's name."""
    module = f"recipes.{re.sub(r'[^a-z0-9]', '_', untuned(Path(model).name).lower())}"
    try:
        found = vars(importlib.import_module(module))
    except ImportError:
        return []
    return [f"{module}:{name}" for name in found if name.startswith("gtpo_lora")]


def _scale(options: PlanOptions, *, is_model: bool) -> int:
    """A step of the recipe's batch on each number of nodes."""
    if options.gpus or options.rollout_gpus:
        raise ConfigError("nodes cannot be combined with gpus or rollout_gpus, which it chooses itself")
    if options.all:
        raise ConfigError("nodes cannot be combined with all: it shows one layout of each way; leave nodes out")
    if min(options.nodes) < 1:
        raise ConfigError(f"nodes={options.nodes}: each must be 1 or more")
    if 0 != options.response_tail <= 1 or options.gpu_hours_between_failures < 0:
        raise ConfigError("response_tail must be above 1, and gpu_hours_between_failures not negative")
    # these import torch, which a plan of layouts does without
    from gtpo_megatron.companions.goodput.failures import GPU_HOURS_BETWEEN_FAILURES
    from gtpo_megatron.companions.goodput.page import print_scale, row_to_plain
    from gtpo_megatron.companions.goodput.scale import TAIL, scale_rows

    config = options.config

    def request_of(config: RunConfig, num_gpus: int, num_rollout_gpus: int) -> PlanRequest:
        cluster = _cluster(options, num_gpus=num_gpus, num_rollout_gpus=num_rollout_gpus)
        return _request(options, config, cluster, is_model=is_model)

    rows = [
        row
        for num_nodes in options.nodes
        for row in scale_rows(
            config,
            request_of,
            num_nodes=num_nodes,
            gpus_per_node=options.gpus_per_node,
            tail=options.response_tail or TAIL,
            gpu_hours_between_failures=options.gpu_hours_between_failures or GPU_HOURS_BETWEEN_FAILURES,
        )
    ]
    if options.json:
        json.dump({"name": config.name, "rows": [row_to_plain(row) for row in rows]}, sys.stdout, indent=1)
        sys.stdout.write("\n")
    else:
        print_scale(config.name, rows, Console())
    return 0 if rows else EXIT_NOTHING_FITS


@configuration
class _GPUOptions:
    """The options that the setting of a model by itself depends on, as in ``PlanOptions``."""

    gpus: PositiveInt = 8
    gpu: GPUName = "h100"
    gpu_memory: float = 0.0
    gpus_per_node: PositiveInt = 8


def _named(name: str, arguments: Sequence[str]) -> RunConfig:
    """The recipe, or the paper's setting with the model of this name on the GPUs that the arguments ask for."""
    if not names_model(name):
        return load_recipe(name)
    known = [f"--{field.name.replace('_', '-')}" for field in fields(_GPUOptions)]
    taken: list[str] = []
    for place, argument in enumerate(arguments):
        option, equals, _ = argument.replace("_", "-").partition("=")
        if option in known:
            taken += [argument] if equals else arguments[place : place + 2]
    options = parse_options(_GPUOptions, taken, program=f"gtpo-megatron plan {name}")
    return paper_setting(
        name,
        num_gpus=options.gpus,
        gpu_memory_gib=options.gpu_memory or GPUS[options.gpu].memory_gib,
        gpus_per_node=options.gpus_per_node,
    )


def _own_cluster(options: PlanOptions, config: RunConfig) -> Cluster:
    """The requested GPUs, or those of the recipe on whole nodes."""
    ranks, more = gpus_of(config)
    needed = ranks + (options.rollout_gpus or more)
    on_nodes = needed if needed <= options.gpus_per_node else needed + -needed % options.gpus_per_node
    return _cluster(
        options,
        num_gpus=options.gpus or on_nodes,
        num_rollout_gpus=options.rollout_gpus or more,
        num_idle_gpus=0 if options.gpus else on_nodes - needed,
    )


def _cluster(options: PlanOptions, *, num_gpus: int, num_rollout_gpus: int, num_idle_gpus: int = 0) -> Cluster:
    """So many of the GPUs that the options name."""
    gpu = GPUS[options.gpu]
    return Cluster(
        gpu=gpu,
        num_gpus=num_gpus,
        gpu_memory=(options.gpu_memory or gpu.memory_gib) * GIB,
        gpus_per_node=options.gpus_per_node,
        host_memory=options.host_memory * GIB,
        num_rollout_gpus=num_rollout_gpus,
        num_idle_gpus=num_idle_gpus,
    )


COMMAND = Command(
    usage="""\
  plan RECIPE|MODEL [--gpus N] [--gpu-memory GIB] [--any.field VALUE ...]
                    memory of every part on every GPU for every layout; needs neither GPUs nor weights;
                    MODEL, such as Qwen/Qwen2.5-32B, is planned in the paper's setting
  plan RECIPE|MODEL --nodes N [N ...]
                    what a step costs on so many nodes: stages, stragglers, failures and restarts""",
    run=run,
    options=PlanOptions,
)
