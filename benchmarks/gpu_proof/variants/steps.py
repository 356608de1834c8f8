"""What a tile of the present way is made of, each step by itself: where the time goes."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import torch

from benchmarks.gpu_proof.variants.catalogue import has_triton
from benchmarks.gpu_proof.variants.measure import Layer
from gtpo_megatron.distributed import tiled_scores as present
from gtpo_megatron.kernels import partials
from gtpo_megatron.kernels.partials import SoftmaxSums
from gtpo_megatron.kernels.tiles import TileKernels, kernels_for, tile_columns

CALLS = 5
"""Between two waits for the device, so that a launch is hidden behind the step before."""


def steps(layer: Layer, rounds: int) -> Iterator[tuple[str, float]]:
    """Median seconds of each step; the tile is the first one, or all columns if they are fewer."""
    calls = CALLS if layer.device.type == "cuda" else 1
    for name, step in _steps(layer):
        step()
        times = []
        for _ in range(rounds):
            _wait(layer)
            began = time.perf_counter()
            for _ in range(calls):
                step()
            _wait(layer)
            times.append((time.perf_counter() - began) / calls)
        yield name, median(times)


def _wait(layer: Layer) -> None:
    if layer.device.type == "cuda":
        torch.cuda.synchronize()


def _steps(layer: Layer) -> Iterator[tuple[str, Callable[[], object]]]:
    problem = layer.problem
    rows = min(problem.chunk, layer.size.tokens)
    columns = min(tile_columns(rows, problem.hidden), layer.size.vocab)
    hidden, weight = problem.hidden.detach()[:rows], problem.weight.detach()[:columns]
    targets = problem.targets[:rows] % columns
    logits = torch.empty(rows, columns, device=layer.device)
    rounded, gradient = torch.empty_like(logits, dtype=hidden.dtype), torch.empty_like(logits, dtype=hidden.dtype)
    hidden_grad = torch.zeros(rows, layer.size.hidden, device=layer.device)
    weight_grad = torch.zeros(columns, layer.size.hidden, device=layer.device)
    yield (
        f"product of {rows} tokens and {columns} rows, as wide as the inputs",
        lambda: torch.mm(hidden, weight.t(), out=rounded),
    )
    yield "the same, logits in float32", lambda: present._matmul(hidden, weight.t(), out=logits)
    present._matmul(hidden, weight.t(), out=logits)
    out = torch.empty(partials.NUM_FIELDS, rows, device=layer.device)
    for name, kernels in _kernels(layer).items():
        reduce = partial(kernels.reduce, logits, targets, None, out)
        yield f"{name} reduction", partial(reduce, owned=False, may_mask=False)
    kernels_for(hidden).reduce(logits, targets, None, out, owned=False, may_mask=False)
    sums = SoftmaxSums(*(total.float() for total in partials.finish(out.double(), 1.0)[2]))
    ones = torch.ones(rows, device=layer.device)
    for name, kernels in _kernels(layer).items():
        make = partial(kernels.gradient, logits, targets, None, sums, ones, None, gradient)
        yield f"{name} gradient", partial(make, may_mask=False)
    yield "product added to the gradient of hidden", lambda: present._add_matmul_(hidden_grad, gradient, weight)
    yield "product added to that of weight", lambda: present._add_matmul_(weight_grad, gradient.t(), hidden)
    table = out.expand(-(-layer.size.vocab // columns), -1, -1).contiguous()
    yield f"present merge of {len(table)} parts", lambda: partials.merge(table, 1.0)
    if has_triton(layer.device.type):
        from benchmarks.gpu_proof.variants.merging import merge

        yield "merge in one launch", lambda: merge(table, 1.0)
    yield "scores of all tokens, inputs checked", problem.fused
    yield "scores of all tokens, as the actor asks for them", lambda: layer.call("scores")


def _kernels(layer: Layer) -> dict[str, TileKernels]:
    found = {"present": kernels_for(layer.problem.hidden)}
    if has_triton(layer.device.type):
        from benchmarks.gpu_proof.variants.lean import LeanKernels

        found["lean"] = LeanKernels().kernels()
    return found
