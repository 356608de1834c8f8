"""The sizes of the proof on one GPU, on tensors that say they are a GPU's: every variant of the output layer fits.

python -m tests.gpu_stack.test_gpu_proof      # GiB at their peak
"""

import argparse
from collections.abc import Iterator

import pytest
import torch

from benchmarks.gpu_proof.sizes import sizes_of
from benchmarks.vocab_parallel import Problem
from tests.gpu_stack.test_head import Watch, fake_kernels

GIB = 1 << 30
ROOM = 70 * GIB
"""Of a GPU of 80 GB."""

HEADS = sizes_of(torch.device("cuda"), small=False).heads

FORWARD = ("bare_forward", "bare_forward_tiled", "fused", "dense", "bare_train")
"""Those that need no autograd, whose threads look for the GPU."""


def peaks(head, *, with_backward: bool) -> Iterator[tuple[str, int]]:
    """Bytes of each variant with the inputs, and of a fused backward pass."""
    sizes = {"tokens": head.tokens, "hidden": head.hidden, "vocab": head.vocab, "chunk": head.chunk}
    problem = Problem(argparse.Namespace(device="cuda", dtype="bfloat16", **sizes))
    inputs = problem.hidden.nbytes + problem.weight.nbytes
    for name in FORWARD:
        with Watch() as watch:
            getattr(problem, name)()
        yield name, watch.peak + inputs
    if not with_backward:
        return
    with torch.enable_grad():
        scores = type(problem).fused.__wrapped__(problem)
    with Watch() as watch:
        scores.logprobs.grad_fn.apply(torch.empty(head.tokens, device="cuda"), None)
    yield "backward of fused", watch.peak + inputs


@pytest.mark.parametrize("head", HEADS, ids=lambda head: head.name)
def test_every_variant_fits_one_gpu(head):
    with fake_kernels():
        found = dict(peaks(head, with_backward=True))
    assert max(found.values()) < ROOM, found
    assert found["fused"] < found["dense"] / 2


def main() -> None:
    for head in HEADS:
        # torch 2.11 cannot follow the shapes of addmm with another output dtype, which the backward pass calls
        with fake_kernels():
            for name, peak in peaks(head, with_backward=False):
                print(f"{head.name:34} {name:20} {peak / GIB:6.2f} GiB")


if __name__ == "__main__":
    main()
