"""Others beside ours: output layers (Liger, cut-cross-entropy, TRL, torch), and a whole step (TRL)."""

import time

from benchmarks.gpu_proof.peer_heads import MAY_HANG, OTHERS, output_layer
from benchmarks.gpu_proof.peer_steps import steps
from benchmarks.gpu_proof.report import Report
from benchmarks.gpu_proof.sizes import Sizes

STEPS_END_S = 430.0
"""After the part's beginning; the layers that may hang come last and take some 20 s."""


def run(report: Report, sizes: Sizes) -> None:
    began = time.perf_counter()
    for head in sizes.heads:
        output_layer(report, head, sizes, OTHERS)
    steps(report, sizes, until=began + STEPS_END_S)
    for head in sizes.heads:
        output_layer(report, head, sizes, MAY_HANG, beside=("fused",))
