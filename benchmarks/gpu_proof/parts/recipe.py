"""The recipe for one GPU, ``recipes.qwen2_5_0_5b:gtpo_1gpu``: seconds and bytes of every stage beside the plan's.

Its model has the sizes and random weights, which end no response before the limit: so the planner is told that length.
"""

import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.gpu_proof.one_gpu_recipe import command, make_model
from benchmarks.gpu_proof.report import Report, Section
from benchmarks.gpu_proof.sizes import Sizes
from benchmarks.gpu_proof.training_runs import STAGES, Rows, Run, eager_engines, gaps, lacking, printed, typical, values
from gtpo_megatron.companions.planner.hardware import GPUS, gpu_of_device

LIMIT_S = 440.0
NUM_STEPS = 6
SETTLING_STEPS = 2
"""Not counted: they compile, or fill caches."""

PLANNED = {
    "timing/rollout_s": "generate",
    "timing/score_s": "score",
    "timing/update_s": "train",
    "timing/weight_sync_s": "push",
}
"""The planner's name of a stage by metric."""

MORE = {
    "timing/actor_forward_backward_s": ("train: forward and backward", "s"),
    "timing/actor_optimizer_s": ("train: optimizer", "s"),
    "throughput/score_tokens_per_s": ("score: rate", "tokens/s"),
    "throughput/update_tokens_per_s": ("train: rate", "tokens/s"),
    "throughput/score_mfu_frac": ("score: MFU", ""),
    "throughput/update_mfu_frac": ("train: MFU", ""),
    "memory/actor_score_gpu_peak_gib": ("score: the trainer's peak of GPU memory", "GiB"),
    "memory/actor_forward_backward_gpu_peak_gib": ("train: the trainer's peak of GPU memory", "GiB"),
    "rollout/response_length_tokens": ("a response", "tokens"),
}

PEAKS = {"memory/actor_score_gpu_peak_gib": "score", "memory/actor_forward_backward_gpu_peak_gib": "train"}
"""Phase of the plan by metric."""


def run(report: Report, sizes: Sizes) -> None:
    until, is_gpu = time.monotonic() + LIMIT_S, sizes.device.type == "cuda"
    with tempfile.TemporaryDirectory() as scratch:
        with report.section("the recipe for one GPU, as it is") as section:
            if reason := lacking(sizes.device):
                section.skip(reason)
                return
            model = make_model(Path(scratch), sizes)
            _train(section, model, Path(scratch) / "run", sizes, until)
        if section.status == "failed" and is_gpu:
            with (
                report.section("the same, with an engine that compiles nothing") as section,
                eager_engines(Path(scratch) / "eager"),
            ):
                _train(section, model, Path(scratch) / "again", sizes, until)


def _train(section: Section, model: Path, folder: Path, sizes: Sizes, until: float) -> None:
    gpu = gpu_of_device(torch.cuda.get_device_name()) if sizes.device.type == "cuda" else None
    recipe = command(model, sizes, num_steps=NUM_STEPS)
    measured = [*recipe, "--logging.peak-tflops-per-rank", f"{GPUS[gpu or 'h100'].bf16_flops / 1e12:g}"]
    one = Run(section, folder, measured, until=until)
    try:
        one.train()
    finally:
        if rows := one.rows():
            _told(section, rows, recipe, gpu)
    section.require("steps that are missing", NUM_STEPS - rows[-1]["step"], at_most=0)


def _told(section: Section, rows: Rows, recipe: list[str], gpu: str | None) -> None:
    """Stages beside the plan for the lengths that the run had; a push's rate; sampler against trainer."""
    lengths = [values(rows, name)[-1] for name in ("rollout/prompt_tokens", "rollout/response_length_tokens")]
    options = ["--mean-prompt-tokens", f"{lengths[0]:.0f}", "--mean-response-tokens", f"{lengths[1]:.0f}", "--json"]
    plan = json.loads(printed("plan", *recipe, *options, *(["--gpu", gpu] if gpu else [])))
    seconds, phases = plan["own"]["estimated_seconds"], plan["stages"][0]["phases"]
    planned = {metric: seconds[name] for metric, name in PLANNED.items()}
    planned |= {metric: _trainer_gib(phases[name]) for metric, name in PEAKS.items()}
    typical(section, rows, STAGES | MORE, after=SETTLING_STEPS, **planned)
    if pushes := values(rows, "timing/weight_sync_s", after=SETTLING_STEPS):
        num_bytes = plan["engine"]["weights"]
        section.figure("pushed", num_bytes / 1e9, "GB")
        section.figure("rate of a push", num_bytes / 1e9 / statistics.median(pushes), "GB/s")
    gaps(section, rows)


def _trainer_gib(phase: dict[str, float]) -> float:
    """What the plan has of the trainer in a phase: what torch's allocator counts, so without the reserve."""
    return sum(num_bytes for part, num_bytes in phase.items() if part != "reserve") / 2**30
