"""The trainer's optimizer and gradients leave the GPU while engines generate, and come back."""

import dataclasses
import time
from typing import Any

import torch

from benchmarks.gpu_proof.models import rollouts_of, trainer
from benchmarks.gpu_proof.report import Report, Section
from benchmarks.gpu_proof.sizes import ModelSize, Sizes
from gtpo_megatron.batch import RolloutShard
from gtpo_megatron.companions.preflight.probes.batches import rewards_in_turns

MIB = 1 << 20

LEFT_BEHIND = 0.02
"""Share of what should have left that may stay: the allocator gives memory back in blocks."""


def run(report: Report, sizes: Sizes) -> None:
    for size in sizes.models:
        few = dataclasses.replace(size, responses=sizes.checked_responses)
        with report.section(f"{size.name}: optimizer and gradients to the host and back") as section:
            _optimizer(section, few, sizes)


def _optimizer(section: Section, size: ModelSize, sizes: Sizes) -> None:
    from gtpo_megatron.actor.host_memory import HostCopies, optimizer_tensors

    is_gpu = sizes.device.type == "cuda"
    with trainer(size, sizes) as (actor, _):
        actor.score_tokens(RolloutShard.of(rollouts_of(size), range(size.responses)))
        actor.credit_tokens(rewards_in_turns(size.responses))
        actor.update(1)
        actor.release_batch()
        parameters = [parameter for chunk in actor._chunks for parameter in chunk.parameters()]
        moved = optimizer_tensors(actor._optimizer, parameters)
        before = [tensor.detach().to("cpu", copy=True) for tensor in moved]
        num_optimizer = sum(tensor.untyped_storage().nbytes() for tensor in moved)
        gradients = {one.main_grad.untyped_storage() for one in parameters}
        num_gradients = sum({storage.data_ptr(): storage.nbytes() for storage in gradients}.values())
        copies = HostCopies()
        leave, back = (actor.offload, actor.onload) if is_gpu else (lambda: copies.park(moved), copies.fetch)
        leaves, returns, left = [], [], []
        for _ in range(3):  # the first time page-locks the host's memory
            allocated = _allocated(sizes)
            leaves.append(_timed(leave, sizes))
            left.append(allocated - _allocated(sizes))
            returns.append(_timed(back, sizes))
        section.figure("optimizer", num_optimizer / MIB, "MiB")
        section.figure("gradients", num_gradients / MIB, "MiB")
        if is_gpu:
            wanted = num_optimizer + num_gradients
            section.figure("left the GPU", left[0] / MIB, "MiB", planned=round(wanted / MIB, 2))
            section.require("share that stayed", 1 - left[0] / wanted, at_most=LEFT_BEHIND)
        section.figure("leaves, the first time", leaves[0], "s")
        section.figure("leaves", leaves[-1], "s")
        section.figure("comes back", returns[-1], "s")
        section.figure("optimizer to the host", num_optimizer / 1e9 / leaves[-1], "GB/s")
        section.figure("optimizer from the host", num_optimizer / 1e9 / returns[-1], "GB/s")
        changed = sum(not torch.equal(old, new.detach().cpu()) for old, new in zip(before, moved, strict=True))
        section.require("tensors that came back changed", changed, at_most=0)


def _timed(call: Any, sizes: Sizes) -> float:
    began = time.perf_counter()
    call()
    if sizes.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def _allocated(sizes: Sizes) -> int:
    return torch.cuda.memory_allocated() if sizes.device.type == "cuda" else 0
