"""Pieces of a preflight for tests: expectations on GPUs that are not there."""

import dataclasses

from gtpo_megatron.companions.preflight.expectations import Device, expectations
from recipes import qwen2_5_32b

H100 = "NVIDIA H100 80GB HBM3"


def device(number, *, name=H100):
    """A board."""
    return Device(uuid=f"GPU-{number}", name=name, memory=85_000_000_000)


def paper_config(**fields):
    """The paper's 64 GPUs, with other fields of the recipe."""
    return dataclasses.replace(qwen2_5_32b.gtpo_64gpu(), **fields)


def on_gpus(*, name=H100, gpu=None):
    """What is expected of the paper's recipe on 64 GPUs."""
    return expectations(paper_config(), [device(number, name=name) for number in range(64)], gpu=gpu, per_node=8)


def on_cpus():
    """Nothing is expected there."""
    return expectations(paper_config(), [], gpu=None, per_node=0)
