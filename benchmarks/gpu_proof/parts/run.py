"""A whole run on one GPU: the CPU's tiny task by Ray, vLLM and Megatron; killed at a step, resumed, to its last one."""

import json
import tempfile
import time
from pathlib import Path

from benchmarks.gpu_proof.report import Report, Section
from benchmarks.gpu_proof.sizes import Sizes
from benchmarks.gpu_proof.training_runs import STAGES, Run, eager_engines, gaps, lacking, learning, typical
from benchmarks.gpu_proof.wheels import ROOT

RECIPE = "benchmarks.gpu_proof.recipes:tiny"
LIMIT_S = 440.0
"""Of all runs; the part itself has a little more."""

SMALL = ["--num-steps", "4", "--checkpoint.every-steps", "1", "--data.prompts-per-step", "4"]
SMALL += ["--evaluation.num-problems", "16"]

ON_CPU = ROOT / "benchmarks" / "results" / "quickstart.json"


def run(report: Report, sizes: Sizes) -> None:
    until, is_gpu = time.monotonic() + LIMIT_S, sizes.device.type == "cuda"
    with tempfile.TemporaryDirectory() as scratch:
        with report.section("the tiny task, killed and resumed") as section:
            if reason := lacking(sizes.device):
                section.skip(reason)
                return
            _killed_and_resumed(section, Path(scratch) / "run", until, is_gpu=is_gpu)
        if section.status == "failed" and is_gpu:
            # what vLLM compiles and captures asks most of a torch that it was not built for
            with (
                report.section("the same, with engines that compile nothing") as section,
                eager_engines(Path(scratch) / "eager"),
            ):
                _killed_and_resumed(section, Path(scratch) / "again", until, is_gpu=is_gpu)


def _killed_and_resumed(section: Section, folder: Path, until: float, *, is_gpu: bool) -> None:
    one, num_steps = Run(section, folder, [RECIPE, *([] if is_gpu else SMALL)], until=until), 40 if is_gpu else 4
    try:
        one.train(killed_after=num_steps // 2)
        one.train(resume=True)
    finally:
        if rows := one.rows():
            on_cpu = json.loads(ON_CPU.read_text(encoding="utf-8"))
            learning(section, rows, {name: on_cpu[f"heldout_{name}"]["mean_at_8"] for name in ("before", "after")})
            gaps(section, rows)
            typical(section, rows, STAGES, after=2)
    section.require("steps that are missing", num_steps - rows[-1]["step"], at_most=0)
