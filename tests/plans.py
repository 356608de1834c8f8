"""Plans of recipes, made by the command itself: one of each request, which is the same for all methods of a recipe."""

import contextlib
import functools
import io
import json
from dataclasses import replace
from typing import Any

from gtpo_megatron.cli import dispatch
from gtpo_megatron.cli.recipe import load_recipe
from gtpo_megatron.companions.planner.hardware import GIB, GPUS
from gtpo_megatron.companions.planner.request import Cluster, gpus_of, request_from

_RECIPES: dict[tuple[str, ...], str] = {}
"""By what the planner reads of a recipe, and the options: the first recipe of which it was planned."""


def plan_of(name: str, *options: str) -> dict[str, Any]:
    """What ``plan NAME --json`` prints with these options, but for the name, which may be that of an equal recipe."""
    config = load_recipe(name)
    trainers, engines = gpus_of(config)
    gpus = Cluster(gpu=GPUS["h100"], gpu_memory=80 * GIB, num_gpus=trainers + engines, num_rollout_gpus=engines)
    read = repr(replace(request_from(config, gpus), name=""))
    return _planned(_RECIPES.setdefault((read, *options), name), options)


@functools.cache
def _planned(name: str, options: tuple[str, ...]) -> dict[str, Any]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert dispatch.run(["plan", name, "--json", *options]) == 0
    return json.loads(printed.getvalue())
