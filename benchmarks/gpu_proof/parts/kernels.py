"""The fused output layer: the Triton kernels against float64, its rate beside cuBLAS's, its memory."""

import argparse
import importlib.util
import os
import time

import torch
from torch import Tensor

from benchmarks.gpu_proof.report import Report, Section
from benchmarks.gpu_proof.sizes import HeadSize, Sizes
from benchmarks.vocab_parallel import Problem, measure_memory, measure_times
from gtpo_megatron.companions.preflight.checks.kernels import BOUNDS, kernel_errors
from gtpo_megatron.companions.preflight.probes.kernels import output_layer
from gtpo_megatron.kernels import partials

MIB = 1 << 20

TILE_ERROR = 2e-6
"""Of a tile's log-probs and entropies in float32, relative to the largest or in nats; torch's own are about as far."""

FORWARD = ("bare_forward", "bare_forward_tiled", "fused", "dense")
TRAINING = ("bare_train", "fused_train", "fused_train_entropy", "dense_train")


def run(report: Report, sizes: Sizes) -> None:
    with report.section("Triton kernels on one tile, against float64") as section:
        is_interpreted = sizes.device.type == "cpu"
        if importlib.util.find_spec("triton") is None:
            section.skip("Triton is not installed")
        elif is_interpreted and os.environ.get("TRITON_INTERPRET") != "1":
            section.skip("without a GPU they run under TRITON_INTERPRET=1 only")
        else:
            _tiles(section, sizes.device)
    for head in sizes.heads:
        with report.section(f"output layer of {head.name}: errors against float64") as section:
            _errors(section, head)
        with report.section(f"output layer of {head.name}: rates and memory") as section:
            _rates(section, head, sizes)


def _tiles(section: Section, device: torch.device) -> None:
    """Both kernels, with and without temperature and a gradient of the entropy, on aligned and odd rows."""
    from gtpo_megatron.kernels import triton_tiles

    worst = {"log-prob": 0.0, "entropy": 0.0, "gradient": 0.0}
    for columns in (4096, 4099):
        for warm in (False, True):
            generator = torch.Generator().manual_seed(columns)
            logits = (torch.randn(24, columns, generator=generator) * 4).to(device)
            logits[:4, 7] = 30.0  # of some rows one token has nearly all the mass
            targets = torch.randint(0, columns, (24,), generator=generator).to(device)
            inverse = torch.linspace(0.7, 1.4, 24).to(device) if warm else None
            wide, factor = logits.double(), 1.0 if inverse is None else inverse.double()[:, None]
            log_p = torch.log_softmax(wide * factor, dim=1)
            entropy = -(log_p.exp() * log_p).sum(1)
            wanted = log_p.gather(1, targets[:, None])[:, 0]
            out = torch.empty(partials.NUM_FIELDS, 24, device=device)
            triton_tiles.reduce_tile(logits, targets, inverse, out, owned=False, may_mask=False)
            scale = 1.0 if inverse is None else inverse.double()
            got, got_entropy, sums = partials.finish(out.double(), scale)
            worst["log-prob"] = max(worst["log-prob"], _largest(got - wanted, wanted))
            worst["entropy"] = max(worst["entropy"], _largest(got_entropy - entropy, entropy))
            worst["gradient"] = max(worst["gradient"], _gradient_error(logits, targets, inverse, sums, log_p, entropy))
    for name, value in worst.items():
        section.require(f"largest error of the {name}", value, at_most=TILE_ERROR)


def _largest(error: Tensor, wanted: Tensor) -> float:
    """In nats, or relative where the right value is larger than one."""
    return float((error.abs() / wanted.abs().clamp(min=1.0)).max())


def _gradient_error(
    logits: Tensor, targets: Tensor, inverse: Tensor | None, sums: partials.SoftmaxSums, log_p: Tensor, entropy: Tensor
) -> float:
    """Largest error of the gradient of ``2 log p - 3 H``, whose terms are at most some units."""
    from gtpo_megatron.kernels import triton_tiles

    float_sums = partials.SoftmaxSums(*(value.float() for value in sums))
    of_logprobs, of_entropy = torch.full_like(sums.rest, 2.0).float(), torch.full_like(sums.rest, -3.0).float()
    out = torch.empty_like(logits)
    triton_tiles.gradient_tile(logits, targets, inverse, float_sums, of_logprobs, of_entropy, out, may_mask=False)
    p = log_p.exp()
    wanted = -2.0 * p + 3.0 * p * (log_p + entropy[:, None])
    wanted.scatter_add_(1, targets[:, None], torch.full_like(wanted[:, :1], 2.0))
    if inverse is not None:
        wanted *= inverse.double()[:, None]
    return float((out.double() - wanted).abs().max())


def _errors(section: Section, head: HeadSize) -> None:
    found = output_layer(head.hidden, head.vocab, min(head.tokens, 512), head.chunk, list(BOUNDS))
    for dtype in BOUNDS:
        section.add(kernel_errors(dtype, {"this GPU": found[dtype]}))


def _rates(section: Section, head: HeadSize, sizes: Sizes) -> None:
    arguments = argparse.Namespace(
        device=sizes.device.type,
        dtype="bfloat16" if sizes.device.type == "cuda" else "float32",
        tokens=head.tokens,
        hidden=head.hidden,
        vocab=head.vocab,
        chunk=head.chunk,
    )
    problem = Problem(arguments)
    product = 2 * head.tokens * head.hidden * head.vocab
    # memory first: later calls find the allocator's blocks, and a CPU's libraries their buffers
    extra = {}
    for name in (*FORWARD, *TRAINING):
        problem.hidden.grad = problem.weight.grad = None
        extra[name] = measure_memory(problem, name)
        section.figure(f"{name}: memory beyond inputs and gradients", extra[name] / MIB, "MiB")
    floor = extra["bare_forward_tiled"]  # which holds one tile of logits
    for name in ("fused", "fused_train"):
        section.figure(f"{name}: memory over the bare product", (extra[name] - floor) / MIB, "MiB")
    times = measure_times(problem, sizes.rounds, time.perf_counter, {"forward": FORWARD, "train": TRAINING})
    times.pop("ratios")
    for name, row in times.items():
        products = 1 if name in FORWARD else 4
        section.figure(f"{name}: rate", products * product / row["median_s"] / 1e12, "TFLOP/s")
        if not name.startswith("bare"):
            section.figure(f"{name}: share of cuBLAS's rate", 1 / row["over_bare"])
    section.figure("all logits in float32", head.tokens * head.vocab * 4 / MIB, "MiB")
