"""The Triton kernels against the torch ones, on CPU tensors under Triton's interpreter.

The interpreter must be chosen before Triton is first imported, hence a process of its own.
"""

import importlib.util
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gtpo_megatron.kernels import partials, torch_tiles
from gtpo_megatron.kernels.partials import SoftmaxSums


def _table(kernel, logits, targets, temperature):
    out = torch.empty(partials.NUM_FIELDS, logits.shape[0])
    kernel(logits, targets, temperature, out, owned=False, may_mask=True)
    # Only merged partials can be compared: a tile without finite columns may be written in two ways.
    everywhere = partials.empty_table(1, logits.shape[0], like=out)
    everywhere[0, partials.MAX] = -5.0
    return partials.merge(torch.stack([out, everywhere[0]]), 1.0 if temperature is None else temperature.double())


def _inputs(columns, kind):
    generator = torch.Generator().manual_seed(columns)
    logits = torch.randn(6, columns, generator=generator) * 3
    if kind == "peaked":
        logits[torch.arange(6), torch.randint(0, columns, (6,), generator=generator)] = 17.0
    if kind == "masked":
        logits[torch.rand(6, columns, generator=generator) < 0.5] = -torch.inf
        logits[2] = -torch.inf
    if kind == "extreme":
        logits[0, 0], logits[1, -1] = 3e4, -3e4
        logits[3] = 2.5
    targets = torch.randint(0, columns, (6,), generator=generator)
    targets[1] = -3
    targets[4] = columns + 1
    return logits, targets, torch.rand(6, generator=generator) + 0.5


def compare_partials():
    from gtpo_megatron.kernels import triton_tiles

    kinds = ("normal", "peaked", "masked", "extreme")
    cases = [*itertools.product((1, 130, 9001), kinds, (torch.float32,), (True,))]
    for columns, kind, dtype, scaled in [*cases, (130, "peaked", torch.bfloat16, False)]:
        logits, targets, temperature = _inputs(columns, kind)
        logits, temperature = logits.to(dtype), temperature if scaled else None
        got = _table(triton_tiles.reduce_tile, logits, targets, temperature)
        want = _table(torch_tiles.reduce_tile, logits, targets, temperature)
        torch.testing.assert_close(
            got, want, rtol=2e-5, atol=1e-7, msg=lambda m, at=(columns, kind, dtype): f"{at} {m}"
        )


def compare_gradients():
    from gtpo_megatron.kernels import triton_tiles

    cases = [*itertools.product((130, 2100), ("normal", "peaked", "masked"), (torch.float32,), (True,), (False, True))]
    for columns, kind, dtype, scaled, entropy in [*cases, (1, "normal", torch.bfloat16, False, True)]:
        logits, targets, temperature = _inputs(columns, kind)
        temperature = temperature if scaled else None
        logits[2] = 0.5
        partial = _table(torch_tiles.reduce_tile, logits, targets, temperature)
        sums = partials.finish(partial, 1.0)[2]
        arguments = (
            targets,
            temperature,
            SoftmaxSums(*(total.float() for total in sums)),
            torch.linspace(-1, 1, 6),
            torch.linspace(2, -1, 6) if entropy else None,
        )
        got, want = torch.empty(6, columns, dtype=dtype), torch.empty(6, columns, dtype=dtype)
        triton_tiles.gradient_tile(logits, *arguments, got, may_mask=True)
        torch_tiles.gradient_tile(logits, *arguments, want, may_mask=True)
        tolerance = {"rtol": 1e-5, "atol": 1e-7} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-7}
        torch.testing.assert_close(got, want, **tolerance, msg=lambda m, at=(columns, kind, dtype): f"{at} {m}")
        in_place = logits.clone()
        triton_tiles.gradient_tile(in_place, *arguments, in_place, may_mask=True)
        torch.testing.assert_close(in_place.to(dtype), got, rtol=1e-2, atol=1e-7)


def compare_not_a_number():
    from gtpo_megatron.kernels import triton_tiles

    for poison in (torch.nan, torch.inf):
        logits, targets, _ = _inputs(9001, "normal")
        logits[3, 4567] = poison
        out = torch.empty(4, 6)
        triton_tiles.reduce_tile(logits, targets, None, out, owned=False, may_mask=True)
        assert out[partials.REST, 3].isnan(), poison
        assert not out[partials.REST, [0, 1, 2, 4, 5]].isnan().any()


def compare_whole_functions():
    """The fused layer with the Triton kernels put in the place of the torch ones."""
    from gtpo_megatron.distributed import tiled_scores, vocab_parallel
    from gtpo_megatron.kernels import triton_tiles
    from gtpo_megatron.kernels.tiles import TORCH_KERNELS, TileKernels

    triton_kernels = TileKernels(reduce=triton_tiles.reduce_tile, gradient=triton_tiles.gradient_tile)
    results = []
    for kernels in (triton_kernels, TORCH_KERNELS):
        tiled_scores.kernels_for = lambda _, kernels=kernels: kernels
        torch.manual_seed(0)
        hidden, weight = torch.randn(5, 4, requires_grad=True), torch.randn(700, 4, requires_grad=True)
        scores = vocab_parallel.linear_token_scores(
            hidden, weight, torch.tensor([0, 5, 698, 3, 3]), None, 0.8, 699, True, 2
        )
        (scores.logprobs.sum() + scores.entropy @ torch.arange(5.0)).backward()
        results.append((scores.logprobs, scores.entropy, hidden.grad, weight.grad))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-6)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_triton_kernels_equal_torch_kernels_under_the_interpreter():
    root = Path(__file__).parents[3]
    checks = "compare_partials(); m.compare_gradients(); m.compare_not_a_number(); m.compare_whole_functions()"
    command = f"import {__name__} as m; m.{checks}; print('compared')"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", command], cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "compared"
