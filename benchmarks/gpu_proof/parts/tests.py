"""The tests that need a GPU, ``tests/gpu``; without one, that of the Triton kernels under their interpreter."""

import os
import re
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu_proof.report import Report
from benchmarks.gpu_proof.sizes import Sizes

ROOT = Path(__file__).resolve().parents[3]

INTERPRETED = "tests/unit/distributed/test_vocab_parallel_triton.py"

LIMIT_S = 420.0


def run(report: Report, sizes: Sizes) -> None:
    with report.section("tests/gpu" if sizes.device.type == "cuda" else INTERPRETED) as section:
        chosen = ["tests/gpu", "-m", "gpu"] if sizes.device.type == "cuda" else [INTERPRETED]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen]
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or ["pytest said nothing"]
        for number, outcome in re.findall(r"(\d+) (passed|failed|skipped|errors?)", lines[-1]):
            section.figure(outcome, int(number), "tests")
        for line in lines:
            if line.startswith(("FAILED", "ERROR", "SKIPPED")):
                section.figure(line.split(" ", 1)[0].lower(), line.split(" ", 1)[1])
        if done.returncode:
            raise RuntimeError(f"pytest ended with {done.returncode}: {lines[-1]}\n" + "\n".join(lines[-60:]))
