"""Whole models on one GPU, of which low-rank adapters are trained: the figures of ``training``."""

from benchmarks.gpu_proof.parts.training import measure
from benchmarks.gpu_proof.report import Report
from benchmarks.gpu_proof.sizes import Sizes


def run(report: Report, sizes: Sizes) -> None:
    for size in sizes.adapted:
        with report.section(f"{size.name}: score and update") as section:
            measure(section, size, sizes)
