"""Others beside ours: output layers (Liger, cut-cross-entropy, TRL, torch), and a whole step (TRL)."""

import importlib.metadata
import time

from benchmarks.gpu_proof.peer_heads import MAY_HANG, OTHERS, output_layer
from benchmarks.gpu_proof.peer_steps import steps
from benchmarks.gpu_proof.report import Report
from benchmarks.gpu_proof.sizes import Sizes

STEPS_END_S = 430.0
"""After the part's beginning; the layers that may hang come last and take some 20 s."""

PACKAGES = ("liger-kernel", "cut-cross-entropy", "trl", "accelerate", "datasets", "vllm", "ray")


def run(report: Report, sizes: Sizes) -> None:
    began = time.perf_counter()
    with report.section("versions") as section:
        for name in PACKAGES:
            try:
                section.figure(name, importlib.metadata.version(name))
            except importlib.metadata.PackageNotFoundError:
                section.figure(name, "not installed")
    for head in sizes.heads:
        output_layer(report, head, sizes, OTHERS)
    steps(report, sizes, until=began + STEPS_END_S)
    for head in sizes.heads:
        output_layer(report, head, sizes, MAY_HANG, beside=("fused",))
