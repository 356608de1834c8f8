"""How much of a small model's time is the host's, who starts its kernels, and what ways to start fewer of them give.

A whole model, in micro-batches of one shape. Each way takes turns with the trainer as it is, step by step, on one
trainer; before, one micro-batch's log-probs and gradients are compared from equal weights.
"""

import contextlib
import dataclasses
import functools
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_proof import layer_ways
from benchmarks.gpu_proof.layer_ways import Call, Switch
from benchmarks.gpu_proof.models import kernels_of_layers, rollouts_of, trainer
from benchmarks.gpu_proof.report import Report, Section
from benchmarks.gpu_proof.sizes import ModelSize, Sizes
from gtpo_megatron.batch import RolloutShard
from gtpo_megatron.companions.planner.hardware import GPUS, gpu_of_device
from gtpo_megatron.companions.preflight.probes.batches import rewards_in_turns
from gtpo_megatron.data.packing import PackedMicroBatch, PackLayout, micro_batches
from gtpo_megatron.observability.metrics import to_scalars

TURNS, TIMED = 3, 5
"""Steps of each side in turns, and micro-batches that are timed alone."""

MEAN_GAP, NORM_GAP, LEAST_COSINE = 0.05, 0.02, 0.99
"""Between two orders of the same sums in bfloat16: nats of a log-prob on average; of the gradient's norm, relative."""

WAYS: tuple[tuple[str, Callable[[Any, Call], Switch], bool], ...] = (
    ("asking the device where sequences start, one sequence after the other", layer_ways.as_it_was, False),
    ("Megatron's fusion of bias, dropout and addition", layer_ways.fused("bias_dropout_fusion"), False),
    ("Megatron's fusion of the activation", layer_ways.fused("bias_activation_fusion"), False),
    ("layers by torch.compile", layer_ways.compiled, False),
    ("CUDA graphs, one a layer", layer_ways.graphed(at_once=False), True),
    ("a CUDA graph of all layers", layer_ways.graphed(at_once=True), True),
    (
        "a CUDA graph of layers by torch.compile",
        layer_ways.graphed(at_once=True, first=layer_ways.compiled),
        True,
    ),
)
"""Name, what makes it, and whether it needs a GPU; a capture that fails may end the process, so graphs are last."""


def run(report: Report, sizes: Sizes) -> None:
    size, is_gpu = sizes.whole, sizes.device.type == "cuda"
    for factor in (2, 4):
        tokens = factor * size.micro_batch_tokens
        with report.section(f"{size.name}: micro-batches of {tokens:,} tokens") as section:
            _larger(section, dataclasses.replace(size, micro_batch_tokens=tokens), sizes)
    with contextlib.ExitStack() as stack:
        probe = None
        with report.section(f"{size.name}: where the time goes") as section:
            probe = _Probe(stack.enter_context(trainer(size, sizes))[0], size, sizes)
            probe.describe(section)
        for name, make, needs_gpu in WAYS:
            with report.section(f"{size.name}: {name}") as section:
                if probe is None:
                    section.skip("the trainer was not built")
                elif needs_gpu and not is_gpu:
                    section.skip("CUDA graphs need a GPU")
                elif kernels_of_layers() == "te":
                    section.skip("these ways are for Megatron's local layers; here they are Transformer Engine's")
                else:
                    _compare(section, probe, make)
    probe = None
    with report.section(f"{size.name}: Megatron's own CUDA graphs") as section:
        if is_gpu:
            _megatron_s_graphs(section, size, sizes)
        else:
            section.skip("CUDA graphs need a GPU")


class _Probe:
    """A trainer, one micro-batch of it, and what both give as they are."""

    def __init__(self, actor: Any, size: ModelSize, sizes: Sizes) -> None:
        self.actor, self.size, self.sizes, self.step_number = actor, size, sizes, 0
        rollouts = rollouts_of(size)
        self.micro = micro_batches(
            rollouts, range(rollouts.num_responses), budget_tokens=size.micro_batch_tokens, layout=PackLayout()
        )[0]

    @functools.cached_property
    def call(self) -> Call:
        """What each layer is called with."""
        return layer_ways.call_of(self.actor, lambda: self.layers_once(backward=False))

    def layers_once(self, *, backward: bool) -> None:
        """Embedding, layers and last norm of the micro-batch, and their backward pass; no output layer."""

        def finish(hidden: Tensor, _: PackedMicroBatch) -> tuple[Tensor, None]:
            return hidden.float().sum() * 1e-6, None

        self._run(finish, backward=backward)

    def answers(self) -> tuple[Tensor, Tensor]:
        """Log-probs of the micro-batch's response tokens, and the gradient of their mean, all float32 elements."""
        kept: list[Tensor] = []

        def finish(hidden: Tensor, micro: PackedMicroBatch) -> tuple[Tensor, None]:
            logprobs = self.actor._head.score(hidden, micro).logprobs
            kept.append(logprobs.detach().float().flatten().clone())
            return -logprobs.mean(), None

        for chunk in self.actor._model:
            chunk.zero_grad_buffer()
        self._run(finish, backward=True)
        trained = [one for chunk in self.actor._chunks for one in chunk.parameters() if one.requires_grad]
        return torch.cat(kept), torch.cat([one.main_grad.detach().float().flatten() for one in trained])

    def _run(self, finish: Any, *, backward: bool) -> None:
        from gtpo_megatron.actor.forward_backward import run_micro_batches

        run_micro_batches(self.actor._model, [self.micro], finish, forward_only=not backward)

    def step(self) -> dict[str, float]:
        """A step's metrics: scores, credit, an update."""
        rollouts = rollouts_of(self.size, policy_version=self.step_number)
        metrics = self.actor.score_tokens(RolloutShard.of(rollouts, range(self.size.responses)))
        self.actor.credit_tokens(rewards_in_turns(self.size.responses))
        self.step_number += 1
        return to_scalars(metrics | self.actor.update(self.step_number))

    def seconds(self, *, backward: bool) -> float:
        """Of the layers of one micro-batch, median."""
        found = []
        for _ in range(TIMED):
            self.wait()
            began = time.perf_counter()
            self.layers_once(backward=backward)
            self.wait()
            found.append(time.perf_counter() - began)
        return statistics.median(found)

    def wait(self) -> None:
        """Until the device has done everything."""
        if self.sizes.device.type == "cuda":
            torch.cuda.synchronize()

    def describe(self, section: Section) -> None:
        """Launches, kernels, waits and their time in the layers of one micro-batch; fusions that are not there."""
        section.figure("layers of", {"te": "Transformer Engine", "torch": "Megatron, local"}[kernels_of_layers()])
        self.layers_once(backward=True)
        self.launches(section, "")
        for flag, reason in layer_ways.missing_fusions().items():
            section.figure(f"not here: {flag}", reason)

    def launches(self, section: Section, what: str) -> None:
        """Figures of the layers of one micro-batch, forward, and forward with backward."""
        num_layers = self.size.config["num_hidden_layers"]
        for name, backward in (("forward", False), ("forward and backward", True)):
            took, found = self.seconds(backward=backward), self._counted(backward=backward)
            section.figure(f"{what}{name}: time of a layer", 1e3 * took / num_layers, "ms")
            for kind, value in found.items():
                if kind == "kernel seconds":
                    section.figure(f"{what}{name}: time of a layer in kernels", 1e3 * value / num_layers, "ms")
                    section.figure(f"{what}{name}: share of the time in kernels", value / took)
                else:
                    section.figure(f"{what}{name}: {kind} of a layer", value / num_layers)

    def _counted(self, *, backward: bool) -> dict[str, float]:
        """By torch's profiler."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.sizes.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as profile:
            self.layers_once(backward=backward)
            self.wait()
        events = profile.events()
        if self.sizes.device.type != "cuda":
            return {"operators": sum(event.name.startswith("aten::") for event in events)}
        on_device = [
            event
            for event in events
            if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
        ]
        kernels = [event for event in on_device if not event.name.startswith(("Memcpy", "Memset"))]
        names = [event.name for event in events if event.device_type != torch.autograd.DeviceType.CUDA]
        return {
            "kernels": len(kernels),
            "kernel seconds": sum(event.time_range.elapsed_us() for event in on_device) / 1e6,
            "launches": sum("Launch" in name and name.startswith("cu") for name in names),
            # the two that end every measurement are left out
            "waits for the device": max(0, sum("Synchronize" in name and name.startswith("cu") for name in names) - 1),
        }


def _compare(section: Section, probe: _Probe, make: Callable[[Any, Call], Switch]) -> None:
    """A way beside the trainer as it is: answers, launches, then steps in turns."""
    torch._dynamo.utils.counters.clear()
    began = time.perf_counter()
    switch = make(probe.actor, probe.call)
    probe.wait()
    section.figure("made in", time.perf_counter() - began, "s")
    if probe.sizes.device.type == "cuda":
        section.figure("memory reserved with it", torch.cuda.memory_reserved() / 2**30, "GiB")
    plain = probe.answers()
    with switch():
        _first(section, "forward", lambda: probe.layers_once(backward=False), probe)
        _first(section, "forward and backward", lambda: probe.layers_once(backward=True), probe)
        changed = probe.answers()
    _close(section, plain, changed)
    del plain, changed
    with switch():
        probe.launches(section, "")
    rows: dict[str, list[dict[str, float]]] = {"as it is": [], "this way": []}
    for turn in range(TURNS + 1):
        for side, context in (("as it is", contextlib.nullcontext), ("this way", switch)):
            with context():
                row = probe.step()
            if turn:  # the first of each is warm-up
                rows[side].append(row)
    _rates(section, rows["this way"], rows["as it is"])
    found = torch._dynamo.utils.counters
    if made := found["stats"].get("unique_graphs"):
        section.figure("graphs that torch.compile made", made)
        section.figure("places where it gave up", sum(found["graph_break"].values()))
    del switch
    torch._dynamo.reset()
    _free(probe.sizes)


def _first(section: Section, name: str, run: Callable[[], None], probe: _Probe) -> None:
    """Seconds of a first pass, which compiles."""
    began = time.perf_counter()
    run()
    probe.wait()
    section.figure(f"first pass, {name}", time.perf_counter() - began, "s")


def _close(section: Section, plain: Sequence[Tensor], changed: Sequence[Tensor]) -> None:
    """Log-probs and gradients of both."""
    gap = (changed[0] - plain[0]).abs()
    section.require("mean gap of log-probs", float(gap.mean()), "nats", at_most=MEAN_GAP)
    section.figure("largest gap of log-probs", float(gap.max()), "nats")
    norms = [float(side[1].norm()) for side in (plain, changed)]
    section.require("difference of the gradient's norms", abs(norms[1] / norms[0] - 1), at_most=NORM_GAP)
    cosine = float(plain[1] @ changed[1]) / (norms[0] * norms[1])
    section.require("1 - cosine of the gradients", 1 - cosine, at_most=1 - LEAST_COSINE)


def _rates(section: Section, rows: Sequence[dict[str, float]], beside: Sequence[dict[str, float]] = ()) -> None:
    """Tokens per second and MFU of scores and updates, medians."""
    for stage in ("score", "update"):
        name = f"throughput/{stage}_tokens_per_s"
        rate = statistics.median(row[name] for row in rows)
        if beside:
            plain = statistics.median(row[name] for row in beside)
            section.figure(f"{stage}: rate", rate, "tokens/s", as_it_is=plain)
            section.figure(f"{stage}: rate over that as it is", rate / plain)
        else:
            section.figure(f"{stage}: rate", rate, "tokens/s")
        if (peak := _peak()) is not None:
            tflops = statistics.median(row[f"throughput/{stage}_tflops_per_rank"] for row in rows)
            section.figure(f"{stage}: MFU, of the data sheet's {peak:.0f} TFLOP/s", tflops / peak)


def _peak() -> float | None:
    """TFLOP/s by the data sheet; None without a GPU that is known."""
    gpu = gpu_of_device(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    return GPUS[gpu].bf16_flops / 1e12 if gpu else None


def _larger(section: Section, size: ModelSize, sizes: Sizes) -> None:
    """Steps with larger micro-batches, by a trainer of their own."""
    try:
        with trainer(size, sizes) as (actor, _):
            probe = _Probe(actor, size, sizes)
            rows = [probe.step() for _ in range(TURNS + 1)][1:]
    except torch.OutOfMemoryError as error:
        section.skip(f"GPU memory: {str(error).splitlines()[0]}")
        return
    _rates(section, rows)
    for name in ("score", "forward_backward"):
        if f"memory/actor_{name}_gpu_peak_gib" in rows[-1]:
            section.figure(f"{name}: peak of GPU memory", rows[-1][f"memory/actor_{name}_gpu_peak_gib"], "GiB")


def _megatron_s_graphs(section: Section, size: ModelSize, sizes: Sizes) -> None:
    """Steps with Megatron's own graphs, if it can make them of packed sequences without Transformer Engine."""
    try:
        with layer_ways.megatron_s_graphs(), trainer(size, sizes) as (actor, _):
            probe = _Probe(actor, size, sizes)
            # the graphs are of the first pass: with gradients, which later passes may leave out
            probe.layers_once(backward=True)
            probe.layers_once(backward=True)
            section.figure("memory reserved with its graphs", torch.cuda.memory_reserved() / 2**30, "GiB")
            rows = [probe.step() for _ in range(TURNS + 1)][1:]
    except Exception as error:  # noqa: BLE001 - whether it can is what is asked
        section.skip(f"Megatron cannot: {type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}")
        return
    _rates(section, rows)


def _free(sizes: Sizes) -> None:
    """What a way has held is given back before the next is measured."""
    gc.collect()
    if sizes.device.type == "cuda":
        torch.cuda.empty_cache()
