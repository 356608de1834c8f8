"""Folders of small models, converted to Megatron's format and back."""

import math

import torch
from safetensors.torch import load_file

from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.weights.conversion import MEGATRON_FOLDER, hf_to_megatron, megatron_to_hf
from gtpo_megatron.weights.hf.reader import weight_files
from tests.distributed.family_models import make_family_model


class Count:
    """Holds what a conversion reports."""

    def __init__(self):
        self.total = self.done = 0

    def start(self, num_bytes):
        self.total = num_bytes

    def advance(self, num_bytes):
        self.done += num_bytes


def layout(tensor=1, pipeline=1, expert=1, expert_tensor=1):
    return ParallelConfig(
        num_ranks=math.lcm(tensor, expert * expert_tensor) * pipeline,
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        sequence_parallel=tensor > 1,
        expert_parallel_size=expert,
        expert_tensor_parallel_size=expert_tensor,
    )


def to_megatron(source, target, parallel=None):
    progress = Count()
    hf_to_megatron(source, target, parallel or layout(), progress=progress)
    assert progress.done == progress.total > 0


def to_hf(source, target, **options):
    progress = Count()
    megatron_to_hf(source / MEGATRON_FOLDER, source, target, progress=progress, **options)
    assert progress.done == progress.total > 0


def contents(folder):
    """Name -> dtype, shape and bytes of every tensor."""
    found = {}
    for path in weight_files(folder):
        for name, tensor in load_file(path).items():
            found[name] = (tensor.dtype, tuple(tensor.shape), tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return found


def make_models(base, families):
    """One folder a family and dtype, a tokenizer file beside."""
    for name, family in families.items():
        for dtype in (torch.float32, torch.bfloat16):
            folder = base / f"{name}-{dtype.itemsize}"
            make_family_model(folder, family, dtype=dtype)
            (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    return base
