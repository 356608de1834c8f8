"""The output layer by ours and by others, of one size: errors against float64, memory, and time in turns."""

import argparse
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu_proof.report import Report, Section
from benchmarks.gpu_proof.sizes import HeadSize, Sizes
from benchmarks.vocab_parallel import Problem, measure_memory, measure_times
from benchmarks.vocab_peers import PEERS, Scores, lacks
from gtpo_megatron.distributed.vocab_parallel import linear_token_scores

MIB = 1 << 20

CHECKED_TOKENS = 512
"""Whose log-probs and gradients are also computed in float64, all logits at once."""

YARDSTICKS = {"forward": "bare_forward", "train": "bare_train"}

ABOUT = {
    "fused": "ours: entropy and temperature too; logits in float32, gradients are summed in float32",
    "dense": "torch, all logits at once: entropy too; logits and gradients are rounded to the inputs' dtype",
} | {name: peer.about for name, peer in PEERS.items()}
"""Every layer by the name of its variants in ``benchmarks.vocab_parallel``."""

MAY_HANG = tuple(name for name in PEERS if name.startswith("cut_cross_entropy"))
"""Their programs wait for each other by locks in the GPU's memory: whoever measures them has all else behind it."""

OTHERS = tuple(name for name in ABOUT if name not in MAY_HANG)


@dataclass(frozen=True, kw_only=True)
class Reference:
    """In float64, from the definitions.

    Attributes:
        logprobs: ``[checked]`` nats.
        entropy: ``[checked]`` nats.
        hidden_grad: ``[checked, H]`` of the log-probs' sum, weighted by the problem's ``upstream``.
        weight_grad: ``[V, H]`` of the same.
    """

    logprobs: Tensor
    entropy: Tensor
    hidden_grad: Tensor
    weight_grad: Tensor


def output_layer(
    report: Report, head: HeadSize, sizes: Sizes, names: Sequence[str], *, beside: Sequence[str] = ()
) -> None:
    """A section for each layer, and one in which they take turns with cuBLAS's bare products.

    Args:
        report: report of the part.
        head: the size.
        sizes: all sizes.
        names: layers, keys of ``ABOUT``.
        beside: layers that take turns too, but are not checked.
    """
    if not any(_reason(name, sizes) == "" for name in names):
        for name in names:
            with report.section(f"{head.name}: {name}") as section:
                section.skip(_reason(name, sizes))
        return
    torch.compiler.reset()  # it gives up after eight versions of a function
    gc.collect()
    if sizes.device.type == "cuda":
        torch.cuda.empty_cache()
    with report.section(f"{head.name}: inputs, and float64") as section:
        problem = Problem(
            argparse.Namespace(
                device=sizes.device.type,
                dtype="bfloat16" if sizes.device.type == "cuda" else "float32",
                tokens=head.tokens,
                hidden=head.hidden,
                vocab=head.vocab,
                chunk=head.chunk,
            )
        )
        reference = _reference(problem)
        section.figure("all logits in float32", head.tokens * head.vocab * 4 / MIB, "MiB")
    if section.status != "passed":
        return
    works = list(beside)
    for name in names:
        with report.section(f"{head.name}: {name}") as section:
            if reason := _reason(name, sizes):
                section.skip(reason)
                continue
            section.figure("what it is", ABOUT[name])
            _errors(section, _scores(problem, name), problem, reference)
            _memory(section, name, problem)
        if section.status == "passed":
            works.append(name)
    del reference
    with report.section(f"{head.name}: in turns{' once more' if beside else ''}") as section:
        section.figure("who", ", ".join(works))
        _times(section, works, problem, sizes)


def _reason(name: str, sizes: Sizes) -> str:
    """Why a layer cannot be run here; empty if it can."""
    return lacks(PEERS[name], sizes.device) if name in PEERS else ""


def _scores(problem: Problem, name: str) -> Callable[[Tensor, Tensor, Tensor], Scores]:
    """Log-probs and entropies of rows of hidden states."""

    def scores(hidden: Tensor, weight: Tensor, targets: Tensor) -> Scores:
        if name in PEERS:
            return PEERS[name].scores(hidden, weight, targets, problem.chunk)
        if name == "fused":
            found = linear_token_scores(hidden, weight, targets, chunk_tokens=problem.chunk)
            return found.logprobs, found.entropy
        log_p = torch.log_softmax((hidden @ weight.t()).float(), dim=1)
        return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(1).detach()

    return scores


def _reference(problem: Problem) -> Reference:
    rows = slice(0, min(CHECKED_TOKENS, problem.hidden.shape[0]))
    hidden = problem.hidden[rows].detach().double().requires_grad_()
    weight = problem.weight.detach().double().requires_grad_()
    log_p = torch.log_softmax(hidden @ weight.t(), dim=1)
    logprobs = log_p.gather(1, problem.targets[rows, None])[:, 0]
    (logprobs * problem.upstream[rows].double()).sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    entropy = -(log_p.detach().exp() * log_p.detach()).sum(1)
    return Reference(logprobs=logprobs.detach(), entropy=entropy, hidden_grad=hidden.grad, weight_grad=weight.grad)


def _errors(
    section: Section,
    scores: Callable[[Tensor, Tensor, Tensor], Scores],
    problem: Problem,
    reference: Reference,
) -> None:
    rows = slice(0, reference.logprobs.shape[0])
    hidden = problem.hidden[rows].detach().requires_grad_()
    weight = problem.weight.detach().requires_grad_()
    logprobs, entropy = scores(hidden, weight, problem.targets[rows])
    (logprobs * problem.upstream[rows]).sum().backward()
    for name, got, wanted in (("log-prob", logprobs, reference.logprobs), ("entropy", entropy, reference.entropy)):
        if got is not None:
            error = (got.detach().double() - wanted).abs()
            section.figure(f"largest error of {name}", float(error.max()), "nats", mean=float(error.mean()))
    for name, got, wanted in (
        ("hidden states", hidden.grad, reference.hidden_grad),
        ("weight", weight.grad, reference.weight_grad),
    ):
        assert got is not None
        relative = float((got.double() - wanted).norm() / wanted.norm())
        section.figure(f"relative error of the gradient of {name}", relative)


def _memory(section: Section, name: str, problem: Problem) -> None:
    """Of all tokens, forward alone and with the backward pass."""
    for variant, what in ((name, "forward"), (f"{name}_train", "forward and backward")):
        problem.hidden.grad = problem.weight.grad = None
        problem.variant(variant)()  # what it compiles and caches is not its working memory
        problem.hidden.grad = problem.weight.grad = None
        section.figure(f"memory beyond inputs and gradients, {what}", measure_memory(problem, variant) / MIB, "MiB")
    problem.hidden.grad = problem.weight.grad = None


def _times(section: Section, works: list[str], problem: Problem, sizes: Sizes) -> None:
    """Time of every layer, and its share of the rate of cuBLAS's bare products, one or four of them."""
    groups = {
        "forward": [YARDSTICKS["forward"], *works],
        "train": [YARDSTICKS["train"], *(f"{name}_train" for name in works)],
    }
    times = measure_times(problem, sizes.rounds, time.perf_counter, groups)
    times.pop("ratios")
    for kind, names in groups.items():
        what = "forward" if kind == "forward" else "forward and backward"
        for name in names:
            told = f"{what}, {name.removesuffix('_train')}"
            section.figure(f"time, {told}", times[name]["median_s"] * 1e3, "ms")
            if name != YARDSTICKS[kind]:
                section.figure(f"share of cuBLAS's rate, {told}", 1 / times[name]["over_bare"])
