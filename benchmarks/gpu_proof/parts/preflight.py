"""``gtpo-megatron preflight`` of the recipe for one GPU: what each of its checks says there."""

import contextlib
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu_proof.one_gpu_recipe import command, make_model
from benchmarks.gpu_proof.report import Report
from benchmarks.gpu_proof.sizes import Sizes
from benchmarks.gpu_proof.training_runs import lacking
from gtpo_megatron.companions.preflight.result import CheckResult

SECONDS = 420
"""That it may take; the part itself has a little more."""


def run(report: Report, sizes: Sizes) -> None:
    with report.section("preflight of the recipe for one GPU") as section, tempfile.TemporaryDirectory() as scratch:
        if reason := lacking(sizes.device):
            section.skip(reason)
            return
        options = [*command(make_model(Path(scratch), sizes), sizes, num_steps=6), "--seconds", str(SECONDS)]
        section.figure("command", f"gtpo-megatron preflight {shlex.join(options)}")
        output = Path(scratch) / "preflight"
        done = subprocess.run(
            [sys.executable, "-m", "gtpo_megatron.cli", "preflight", *options, "--output", str(output)],
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS + 30,
        )
        section.logs |= {"output": done.stdout[-12000:], "errors": done.stderr[-3000:]}
        with contextlib.suppress(FileNotFoundError):
            section.logs["log.txt"] = (output / "log.txt").read_text(encoding="utf-8", errors="replace")[-6000:]
        found = json.loads((output / "preflight.json").read_text(encoding="utf-8"))
        section.figure("results", found["summary"])
        for line in found["lines"]:
            section.add(CheckResult(**line | {"what": f"{line['check']}: {line['what']}"}))
        if done.returncode:
            raise RuntimeError(f"it ended with {done.returncode}")
