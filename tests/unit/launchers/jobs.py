"""Jobs for tests: options of a launch as the command line gives them."""

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
