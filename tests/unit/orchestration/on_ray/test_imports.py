"""What each kind of process has loaded when it is ready: most of a start are imports, and most of those are few."""

import json
import subprocess
import sys

import pytest

from gtpo_megatron.orchestration.on_ray.worker_servers import ENGINE_MODULES, TRAINER_MODULES

HEAVY = (
    "torch",
    "torch._dynamo",
    "torch._inductor.lowering",
    "transformers",
    "vllm",
    "megatron.core",
    "ray",
    "plotly",
    "pandas",
)
"""Each takes half a second or more."""

CHILD = """\
import importlib, json, os, sys
sys.modules.update(dict.fromkeys(json.loads(sys.argv[1])))
for name in json.loads(sys.argv[2]):
    importlib.import_module(name)
print(json.dumps([name for name in json.loads(sys.argv[3]) if sys.modules.get(name)]))
"""

KINDS = {
    "a command": (["gtpo_megatron.cli.dispatch"], []),
    "the helper": (["gtpo_megatron.orchestration.run_supervisor"], []),
    "a worker that a server makes": (["gtpo_megatron.orchestration.on_ray.worker_setup"], []),
    "the driver": (["gtpo_megatron.train", "gtpo_megatron.orchestration.on_ray.run"], ["torch"]),
    "a rank": (["gtpo_megatron.actor.actor"], ["torch", "megatron.core"]),
    "ranks and the reward process": (TRAINER_MODULES, ["torch", "torch._dynamo", "transformers", "megatron.core"]),
    "an engine": (ENGINE_MODULES, ["torch", "torch._dynamo", "torch._inductor.lowering", "transformers", "vllm"]),
}
"""Modules that it begins with, and which of ``HEAVY`` come along."""


def loaded_by(modules, without=()):
    command = [sys.executable, "-W", "ignore", "-c", CHILD, *map(json.dumps, (without, list(modules), HEAVY))]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("an engine", "ranks and the reward process")])
def test_a_process_loads_what_it_needs(kind):
    modules, expected = KINDS[kind]
    assert loaded_by(modules) == expected


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("kind", ["an engine", "ranks and the reward process"])
def test_a_server_loads_what_its_workers_need(kind):
    """Ray's library not at all: it reads the environment of a worker when it is loaded."""
    modules, expected = KINDS[kind]
    assert loaded_by(modules, without=["ray"]) == expected
