"""Kernels against float64, and a layer of the recipe's shape against transformers."""

import math
from collections.abc import Mapping
from typing import Any

from gtpo_megatron.companions.preflight.context import PreflightContext
from gtpo_megatron.companions.preflight.expectations import Expectations
from gtpo_megatron.companions.preflight.probes import kernels
from gtpo_megatron.companions.preflight.result import CheckResult, assessed, bounded
from gtpo_megatron.companions.preflight.runner import Results
from gtpo_megatron.config.serialize import to_plain

BOUNDS = {"bfloat16": {"scores": 2e-4, "gradients": 1e-2}, "float32": {"scores": 1e-4, "gradients": 1e-4}}
"""Of the output layer against float64: nats, and relative. Inputs are exact in both; stored bfloat16 gradients are
rounded. A tensor core's float32 sum of 5,120 products is 4.9e-5 off on an H100, in a logit and in the sum over all."""

KERNEL_SHARE = 0.5
"""Of what a plain product should reach, for the output layer, which reads its tiles again."""

CPU_TOKENS, GPU_TOKENS = 256, 8192
CPU_VOCABULARY = 4096

LAYER_ERROR = {"float32": 1e-3, "bfloat16": 5e-2}
"""Of log-probs, over their standard deviation; a layer in bfloat16 is right to two digits."""

UPDATE_ERROR = {"float32": 1e-2, "bfloat16": 1e-1}
"""Of the change that an update makes to log-probs, likewise: signs of gradients close to zero are rounding's."""

NORM_ERROR = {"float32": 1e-3, "bfloat16": 3e-2}


def output_kernels(context: PreflightContext) -> Results:
    """The fused output layer against float64, on every GPU."""
    arch = context.architecture
    has_gpus = context.has_gpus
    dtypes = sorted({"float32", context.config.model.dtype})
    arguments = {
        "hidden_size": arch.hidden_size,
        "vocab_size": arch.vocab_size if has_gpus else min(arch.vocab_size, CPU_VOCABULARY),
        "tokens": GPU_TOKENS if has_gpus else CPU_TOKENS,
        "chunk_tokens": context.config.model.head_chunk_tokens,
        "dtypes": dtypes,
    }
    machines = context.processes
    names = machines.ranks if has_gpus else machines.ranks[:1]
    found = context.ask_children(names, f"{kernels.__name__}:output_layer", arguments)
    for dtype in dtypes:
        yield kernel_errors(dtype, {name: answer[dtype] for name, answer in found.items()})
    yield kernel_rate({name: answer[context.config.model.dtype] for name, answer in found.items()}, context.expected)


def kernel_errors(dtype: str, found: Mapping[str, Mapping[str, Any]]) -> CheckResult:
    """The largest errors of all GPUs, and whose they are; NaN fails."""

    def worst(quantity: str) -> tuple[float, str]:
        def size(name: str) -> float:
            value = float(found[name][quantity])
            return math.inf if math.isnan(value) else value

        name = max(found, key=size)
        return size(name), name

    logprob = max(worst("logprobs"), worst("entropy"))
    gradient = worst("gradients")
    bounds = BOUNDS[dtype]
    whose = next(iter(found.values()))["kernels"]
    return assessed(
        f"output layer in {dtype} ({whose} kernels) against float64",
        f"{logprob[0]:.1e} nats ({logprob[1]}), gradients {gradient[0]:.1e} ({gradient[1]})",
        is_good=logprob[0] <= bounds["scores"] and gradient[0] <= bounds["gradients"],
        expected=f"at most {bounds['scores']:.0e} nats, {bounds['gradients']:.0e}",
        remedy="wrong on one GPU: leave its node out; wrong on all: torch and Triton are not the tested versions; "
        "run pytest tests/gpu/test_vocab_parallel.py and report it",
        figures={"error_nats": logprob[0], "gradient_error": gradient[0]},
    )


def kernel_rate(found: Mapping[str, Mapping[str, Any]], expected: Expectations) -> CheckResult:
    """Operations a second of the slowest GPU's output layer."""
    name = max(found, key=lambda one: float(found[one]["seconds"]))
    flops = float(found[name]["flops"]) / float(found[name]["seconds"])
    least = None if expected.matrix_flops is None else KERNEL_SHARE * expected.matrix_flops
    share = f", {flops / expected.gpu.bf16_flops:.0%} of the bfloat16 rate" if expected.gpu else ""
    return bounded(
        "output layer, forward and backward",
        f"{flops / 1e12:.3g} TFLOP/s ({name}){share}",
        is_good=flops >= (least or 0.0),
        expected=f"at least {(least or 0.0) / 1e12:.0f} TFLOP/s",
        remedy="if plain matrix products are fast, Triton is missing or falls back: see the kernels' name above",
        unknown=expected.why_no_rates if least is None else None,
        figures={"flops": flops},
    )


def layer(context: PreflightContext) -> Results:
    """One layer and one update of the model's shape against transformers, on one GPU of every node."""
    arguments = {"config": to_plain(context.config)}
    names = context.one_per_host
    probe = "gtpo_megatron.companions.preflight.probes.layer:compare_layer"
    found = context.ask_children(names, probe, arguments)
    for name, answer in found.items():
        yield layer_errors(context.processes.hosts[name], answer, dtype=context.config.model.dtype)


def layer_errors(host: str, found: Mapping[str, Any], *, dtype: str) -> CheckResult:
    """Errors of a layer on one node."""
    limits = {"logprobs": LAYER_ERROR[dtype], "change": UPDATE_ERROR[dtype], "grad_norm": NORM_ERROR[dtype]}
    figures = {name: float(found[name]) for name in limits}
    return assessed(
        f"{found['layers']} layer(s), {found['kernels']}, in {dtype} against transformers, on {host}",
        f"log-probs {figures['logprobs']:.1e}, gradient norm {figures['grad_norm']:.1e}, change by an update "
        f"{figures['change']:.1e} (relative)",
        is_good=all(figures[name] <= limit for name, limit in limits.items()),
        expected=", ".join(f"{limit:.0e}" for limit in (limits["logprobs"], limits["grad_norm"], limits["change"])),
        remedy="this layer does not compute the model, so do not train with it: install the tested versions",
        figures=figures,
    )
