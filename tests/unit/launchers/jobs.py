"""Jobs for tests: options of a launch as the command line gives them."""

import functools
from dataclasses import replace

from gtpo_megatron.cli.recipe import parse
from launchers.options import SlurmOptions
from launchers.slurm import PROGRAM

TINY = ["--gpus-per-node", "0", "--nodes", "2", "--parallel.tensor-parallel-size", "1"]
ANYWHERE = ["--account", "team", "--partition", "batch"]


def tiny_options(*overrides, run_dir="", recipe="recipes.tiny_cpu:gtpo"):
    """Two ranks on two nodes without GPUs."""
    return parse("", SlurmOptions, [recipe, *ANYWHERE, *TINY, "--run-dir", str(run_dir), *overrides], program=PROGRAM)


def big_options(*overrides, run_dir=""):
    """The paper's 64 GPUs."""
    arguments = ["recipes.qwen2_5_32b:gtpo_64gpu", *ANYWHERE, "--nodes", "8", "--run-dir", str(run_dir), *overrides]
    return parse("", SlurmOptions, arguments, program=PROGRAM)


def with_options(**fields):
    """The same with other fields, ``name`` among them; quicker, since no command line is read."""
    options = _plain_options()
    if "name" in fields:
        options = replace(options, config=replace(options.config, name=fields.pop("name")))
    return replace(options, **fields)


def with_evaluation(**fields):
    """The configuration of the same run, measured otherwise."""
    config = _plain_options().config
    return replace(config, evaluation=replace(config.evaluation, **fields))


@functools.cache
def _plain_options():
    return tiny_options()
