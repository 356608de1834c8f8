"""The actor, with two layers of a model's widths or a whole model: rates, and its bytes against the planner's."""

import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_proof.models import kernels_of_layers, rollouts_of, trainer
from benchmarks.gpu_proof.report import Report, Section
from benchmarks.gpu_proof.sizes import ModelSize, Sizes
from gtpo_megatron.batch import RolloutShard
from gtpo_megatron.companions.planner.activations import (
    Kernels,
    layer_bytes_per_token,
    saved_by_final_norm,
    saved_by_layer,
)
from gtpo_megatron.companions.planner.adapters import adapted_state, adapter_parameters, saved_by_adapters
from gtpo_megatron.companions.planner.hardware import GPUS, gpu_of_device
from gtpo_megatron.companions.planner.layout import Layout
from gtpo_megatron.companions.planner.trainer_state import stage_parameters, trainer_state
from gtpo_megatron.companions.preflight.probes.batches import rewards_in_turns
from gtpo_megatron.data.packing import PackLayout, micro_batches
from gtpo_megatron.observability.metrics import to_scalars
from gtpo_megatron.weights.architecture import VOCAB_MULTIPLE, Architecture
from gtpo_megatron.weights.config_json import read_architecture

MIB = 1 << 20

PLAN_ERROR = 0.02
"""Between bytes that are planned and bytes that are there."""

ACTIVATION_ERROR = 0.15
"""The same for activations."""


def run(report: Report, sizes: Sizes) -> None:
    for size in (*sizes.models, sizes.whole):
        with report.section(f"{size.name}: score and update") as section:
            measure(section, size, sizes)


def measure(section: Section, size: ModelSize, sizes: Sizes) -> None:
    """Every figure of one model."""
    with trainer(size, sizes) as (actor, folder):
        arch = read_architecture(folder)
        section.figure("layers of", {"te": "Transformer Engine", "torch": "Megatron, local"}[kernels_of_layers()])
        _activations(section, actor, arch, size, sizes)
        _steps(section, actor, size, sizes)
        _state(section, actor, arch, size, sizes)


def _activations(section: Section, actor: Any, arch: Architecture, size: ModelSize, sizes: Sizes) -> None:
    """Bytes that autograd keeps of one micro-batch between the layers' forward and their backward."""
    from gtpo_megatron.actor.forward_backward import run_micro_batches

    rollouts = rollouts_of(size)
    micro = micro_batches(
        rollouts, range(rollouts.num_responses), budget_tokens=size.micro_batch_tokens, layout=PackLayout()
    )[0]
    weights = {weight.untyped_storage().data_ptr() for chunk in actor._chunks for weight in chunk.parameters()}
    kept: dict[int, Any] = {}  # storages stay alive until they are counted, so that no two have one address
    found: dict[str, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if not found and storage.data_ptr() not in weights:  # what a layer makes again in the backward pass is not kept
            kept[storage.data_ptr()] = storage
        return tensor

    def finish(hidden: Tensor, _: object) -> tuple[Tensor, None]:
        found["autograd"] = sum(storage.nbytes() for storage in kept.values())
        if sizes.device.type == "cuda":
            found["allocator"] = torch.cuda.memory_allocated() - before
        kept.clear()
        return hidden.float().sum() * 0.0, None

    before = torch.cuda.memory_allocated() if sizes.device.type == "cuda" else 0
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run_micro_batches(actor._model, [micro], finish, forward_only=False)
    layout, kernels = Layout(num_ranks=1), _kernels()
    planned = layer_bytes_per_token(layout, saved_by_final_norm(arch, 2))
    for kind, count in arch.layers_between(0, arch.num_layers):
        saved = saved_by_layer(arch, kernels, 2, size.recompute, kind)
        if size.adapter.is_on and size.recompute == "none":
            saved += saved_by_adapters(arch, size.adapter, 2, kind)
        planned += count * layer_bytes_per_token(layout, saved)
    planned *= int((rollouts.prompt_lengths + rollouts.response_lengths)[list(micro.rows)].sum())
    for name, value in found.items():
        section.figure(
            f"activations of a micro-batch, by the {name}", value / MIB, "MiB", planned=round(planned / MIB, 2)
        )
    beyond = found["autograd"] / planned - 1
    section.require("activations: beyond the plan", beyond, at_most=ACTIVATION_ERROR)
    if kernels == "te" or sizes.device.type == "cpu":  # on a GPU the plan is not of local layers, which fuse their gate
        section.require("activations: short of the plan", -beyond, at_most=ACTIVATION_ERROR)


def _kernels() -> Kernels:
    return "te" if kernels_of_layers() == "te" else "torch"


def _steps(section: Section, actor: Any, size: ModelSize, sizes: Sizes) -> None:
    """Whole steps from the same responses."""
    rows: list[dict[str, float]] = []
    for number in range(sizes.warm_rounds + sizes.rounds):
        rollouts = rollouts_of(size, policy_version=number)
        metrics = actor.score_tokens(RolloutShard.of(rollouts, range(size.responses)))
        actor.credit_tokens(rewards_in_turns(size.responses))
        rows.append(to_scalars(metrics | actor.update(number + 1)))
    timed = rows[sizes.warm_rounds :]
    peak = None
    if sizes.device.type == "cuda" and (gpu := gpu_of_device(torch.cuda.get_device_name())):
        peak = GPUS[gpu].bf16_flops / 1e12
    for stage in ("score", "update"):
        section.figure(f"{stage}: rate", _median(timed, f"throughput/{stage}_tokens_per_s"), "tokens/s")
        tflops = _median(timed, f"throughput/{stage}_tflops_per_rank")
        section.figure(f"{stage}: model's operations", tflops, "TFLOP/s")
        if peak is not None:
            section.figure(f"{stage}: MFU, of the data sheet's {peak:.0f} TFLOP/s", tflops / peak)
    for name in ("score", "forward_backward", "optimizer"):
        section.figure(f"{name}: time", _median(timed, f"timing/actor_{name}_s"), "s")
        if f"memory/actor_{name}_gpu_peak_gib" in rows[-1]:
            section.figure(f"{name}: peak of GPU memory", rows[-1][f"memory/actor_{name}_gpu_peak_gib"], "GiB")
    section.require("updates that were skipped", sum(row["optimizer/skipped_count"] for row in rows), at_most=0)
    section.figure("gradient norm of the last update", rows[-1]["optimizer/grad_norm"])


def _median(rows: Sequence[dict[str, float]], name: str) -> float:
    return statistics.median(row[name] for row in rows)


def _state(section: Section, actor: Any, arch: Architecture, size: ModelSize, sizes: Sizes) -> None:
    """Weights, gradients and optimizer after an update."""
    from gtpo_megatron.actor.host_memory import optimizer_tensors

    parameters = [parameter for chunk in actor._chunks for parameter in chunk.parameters()]
    found = {
        "weights": _bytes([parameter.data for parameter in parameters]),
        "gradients": _bytes([parameter.main_grad for parameter in parameters if parameter.requires_grad]),
        "optimizer": _bytes(optimizer_tensors(actor._optimizer, parameters)),
    }
    layout = Layout(num_ranks=1, distributed_optimizer=True)
    multiple = VOCAB_MULTIPLE if sizes.device.type == "cuda" else 1
    weights = stage_parameters(arch, layout, 0, multiple)
    plan = trainer_state(weights, layout, weight_bytes=2)
    if size.adapter.is_on:
        adapters = adapter_parameters(arch, layout, 0, size.adapter)
        plan = adapted_state(weights, adapters, layout, weight_bytes=2, adapter_bytes=2)
    for name, value in found.items():
        planned = getattr(plan, name)
        section.figure(name, value / MIB, "MiB", planned=round(planned / MIB, 2))
        section.require(f"{name}: distance from the plan", abs(value / planned - 1), at_most=PLAN_ERROR)
    if sizes.device.type == "cuda":
        whole = torch.cuda.memory_allocated()
        planned = sum(getattr(plan, name) for name in found)
        section.figure("allocated after an update", whole / MIB, "MiB", planned=round(planned / MIB, 2))


def _bytes(tensors: Sequence[Tensor]) -> int:
    """Every storage once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
