"""The fused output layer, forward and backward, against a dense float64 computation, and its rate."""

import time
from statistics import median
from typing import Any

import torch
from torch import Tensor

from gtpo_megatron.distributed.vocab_parallel import linear_token_scores
from gtpo_megatron.kernels.tiles import TORCH_KERNELS, kernels_for

CHECKED_TOKENS = 256
"""Tokens that the float64 reference also computes: ``[tokens, vocabulary]`` of it must fit."""

PASSES = 5
PRODUCTS = 4
"""Products of a forward and backward pass: logits, logits again, and the gradients of hidden states and weights."""


def output_layer(
    hidden_size: int, vocab_size: int, tokens: int, chunk_tokens: int, dtypes: list[str]
) -> dict[str, Any]:
    """Errors and rate for each dtype.

    Returns:
        By dtype: ``logprobs``, ``entropy`` (largest differences, nats), ``gradients`` (largest relative error of both),
        ``seconds`` of a forward and backward pass over ``tokens``, ``flops`` of it, and ``kernels``, whose.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    return {
        name: _of_dtype(getattr(torch, name), device, hidden_size, vocab_size, tokens, chunk_tokens) for name in dtypes
    }


def _of_dtype(
    dtype: torch.dtype, device: torch.device, hidden_size: int, vocab_size: int, tokens: int, chunk_tokens: int
) -> dict[str, Any]:
    generator = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, generator=generator, device=device).to(dtype)
    # logits with a standard deviation of 3, as sharp as a policy's
    weight = torch.randn(vocab_size, hidden_size, generator=generator, device=device).mul_(3 / hidden_size**0.5)
    weight = weight.to(dtype)
    targets = torch.randint(0, vocab_size, (tokens,), generator=generator, device=device)
    checked = min(tokens, CHECKED_TOKENS)
    found = _passed(hidden[:checked], weight, targets[:checked], chunk_tokens)
    wanted = _dense(hidden[:checked], weight, targets[:checked])
    names = ("logprobs", "entropy")
    errors = {name: float((found[name].double() - wanted[name]).abs().max()) for name in names}
    gradients = [
        float((found[name].double() - wanted[name]).norm() / wanted[name].norm()) for name in ("hidden", "weight")
    ]
    del found, wanted
    times = []
    for _ in range(PASSES):
        began = time.perf_counter()
        _passed(hidden, weight, targets, chunk_tokens)
        times.append(time.perf_counter() - began)
    return {
        **errors,
        "gradients": max(gradients),
        "seconds": median(times[1:]),
        "flops": 2 * PRODUCTS * tokens * hidden_size * vocab_size,
        "kernels": "torch" if kernels_for(hidden) is TORCH_KERNELS else "Triton",
    }


def _passed(hidden: Tensor, weight: Tensor, targets: Tensor, chunk_tokens: int) -> dict[str, Tensor]:
    """Scores and gradients of ``sum(log p)``; the device has done its work when it returns."""
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    scores = linear_token_scores(hidden, weight, targets, chunk_tokens=chunk_tokens)
    scores.logprobs.sum().backward()  # type: ignore[no-untyped-call]
    if hidden.is_cuda:
        torch.cuda.synchronize()
    assert hidden.grad is not None
    assert weight.grad is not None
    return {
        "logprobs": scores.logprobs.detach(),
        "entropy": scores.entropy.detach(),
        "hidden": hidden.grad,
        "weight": weight.grad,
    }


def _dense(hidden: Tensor, weight: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """The same in float64 from the definitions, all logits at once."""
    wide_hidden, wide_weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logprobs = torch.log_softmax(wide_hidden @ wide_weight.T, dim=-1)
    chosen = logprobs.gather(1, targets[:, None])[:, 0]
    chosen.sum().backward()  # type: ignore[no-untyped-call]
    assert wide_hidden.grad is not None
    assert wide_weight.grad is not None
    return {
        "logprobs": chosen.detach(),
        "entropy": -(logprobs.exp() * logprobs).sum(-1).detach(),
        "hidden": wide_hidden.grad,
        "weight": wide_weight.grad,
    }
