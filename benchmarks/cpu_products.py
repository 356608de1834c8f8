"""What a processor gives to matrix products and to attention, and what a step of a real size has of it.

    python -m benchmarks.cpu_products --json cpu_products.json

Tables of one thread: GFLOP/s of the products of a layer (forward, both gradients) by MKL, by oneDNN and in bfloat16;
milliseconds of attention over sequences of one length, forward and backward, by torch's kernel for each dtype, with the
products of both libraries, and as ``actor/model/core_attention.py`` does it; milliseconds of norms and rotations,
forward and backward, in torch's and Megatron's passes over all tokens and by the tiles of ``actor/cpu_tiles.py``,
where freed memory is kept as a rank keeps it; seconds of forward and backward of a model of SmolLM2-135M's sizes with
random weights, and the memory of that rank after it, before and after what is free goes back. All ways of a row take
turns, and a figure is the median over the rounds.
"""

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import psutil
import torch
import torch.nn.functional as F
import tyro
from torch import Tensor

from benchmarks.actor import PROMPT_TOKENS, Actor, make_batch
from benchmarks.peer_step import SIZES, make_model
from gtpo_megatron.actor import cpu_platform
from gtpo_megatron.observability.memory import GIB, keep_free_memory, return_free_memory

cpu_platform.install()

from megatron.core.models.common.embeddings import rope_utils  # noqa: E402, TID251 - after that line; Megatron's own way

from gtpo_megatron.actor import cpu_tiles  # noqa: E402
from gtpo_megatron.actor.model.core_attention import Block, CPUAttention  # noqa: E402

LAYERS = ((128, 512), (256, 1024), (384, 1024), (576, 1536), (1024, 2816))
"""Hidden units and those of the MLP."""
TOKENS = 2048
HEADS, GROUPS, HEAD_SIZE = 9, 3, 64
SEQUENCES = ((40, 32), (120, 16), (512, 4))
"""Tokens and number of sequences."""
FUNCTIONS = ((8192, 128, 2), (4096, 384, 6), (1024, 576, 9))
"""Tokens of a micro-batch, hidden units, heads: of the three models of ``benchmarks.peer_step``."""
TableName = Literal["products", "attention", "functions", "step"]
LIBRARIES = {"mkl": "none", "onednn": "bf16"}
"""Values of torch's switch; see ``kernels/cpu_products.py``."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Command line.

    Attributes:
        json: file to write; empty: standard output only.
        rounds: turns of every way.
        responses: of the model's batch, of 24 to 48 tokens each after 32 of prompt.
        tables: to make.
    """

    json: str = ""
    rounds: int = 9
    responses: int = 24
    tables: tuple[TableName, ...] = get_args(TableName)


def in_turns(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each, after one call that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, call in ways.items():
            start = time.perf_counter()
            call()
            if number:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def by(library: str, call: Callable[[], object]) -> None:
    """A call whose float32 products one library computes."""
    torch.backends.mkldnn.matmul.fp32_precision = LIBRARIES[library]
    call()


def products(hidden: int, ffn: int, rounds: int) -> dict[str, float]:
    """GFLOP/s of a layer's products."""
    matrices = [
        torch.randn(rows, columns) for rows, columns in ((2 * hidden, hidden), (2 * ffn, hidden), (hidden, ffn))
    ]
    operands = [(w, torch.randn(TOKENS, w.shape[1]), torch.randn(TOKENS, w.shape[0])) for w in matrices]
    halves = [tuple(tensor.bfloat16() for tensor in three) for three in operands]

    def layer(tensors: list[Any]) -> None:
        for weight, values, gradient in tensors:
            F.linear(values, weight), gradient @ weight, gradient.t() @ values

    found = in_turns(
        {
            "mkl": lambda: by("mkl", lambda: layer(operands)),
            "onednn": lambda: by("onednn", lambda: layer(operands)),
            "bfloat16": lambda: layer(halves),
        },
        rounds,
    )
    operations = sum(6 * TOKENS * w.numel() for w in matrices)
    return {name: operations / seconds / 1e9 for name, seconds in found.items()}


def attention(length: int, number: int, rounds: int) -> dict[str, float]:
    """Milliseconds of causal attention, forward and backward."""
    shapes = [(number * length, heads, HEAD_SIZE) for heads in (HEADS, GROUPS, GROUPS)]
    whole = (0, number * length)
    singles = [torch.randn(shape).requires_grad_() for shape in shapes]
    halves = [tensor.detach().bfloat16().requires_grad_() for tensor in singles]

    def attend(inputs: list[Tensor], *, is_ours: bool) -> None:
        if is_ours:
            output = CPUAttention.apply(*inputs, None, [Block(whole, (whole,), number)], 0, HEAD_SIZE**-0.5)
        else:
            query, key, value = (tensor.unflatten(0, (number, length)).transpose(1, 2) for tensor in inputs)
            output = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        output.backward(torch.ones_like(output))

    found = in_turns(
        {
            "float32_mkl": lambda: by("mkl", lambda: attend(singles, is_ours=False)),
            "float32_onednn": lambda: by("onednn", lambda: attend(singles, is_ours=False)),
            "float32_ours": lambda: by("onednn", lambda: attend(singles, is_ours=True)),
            "bfloat16_torch": lambda: by("mkl", lambda: attend(halves, is_ours=False)),
            "bfloat16_ours": lambda: by("onednn", lambda: attend(halves, is_ours=True)),
        },
        rounds,
    )
    return {name: 1e3 * seconds for name, seconds in found.items()}


def functions(tokens: int, hidden: int, heads: int, dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """Milliseconds of a layer's norm and of its queries' rotation, forward and backward."""
    weight = torch.rand(hidden, dtype=dtype, requires_grad=True)
    angles = torch.randn(tokens, 1, 1, HEAD_SIZE // 2).repeat(1, 1, 1, 2)
    of_layer = torch.randn(tokens, 1, hidden, dtype=dtype, requires_grad=True)
    of_heads = torch.randn(tokens, 1, heads + 2, HEAD_SIZE, dtype=dtype, requires_grad=True)
    rotate = rope_utils._apply_rotary_pos_emb_bshd

    def both(function: Callable[[Tensor], Tensor], *inputs: Tensor) -> Callable[[], object]:
        def call() -> object:
            output = function(inputs[0])
            return torch.autograd.grad(output, inputs, torch.ones_like(output))

        return call

    ways = {
        "norm": (
            both(lambda x: F.rms_norm(x, (hidden,), weight, 1e-5), of_layer, weight),
            both(lambda x: cpu_tiles.rms_norm(x, weight, 1e-5), of_layer, weight),
        ),
        "rotation": (
            both(lambda x: rotate.__wrapped__(x[:, :, :heads], angles), of_heads),
            both(lambda x: rotate(x[:, :, :heads], angles), of_heads),
        ),
    }
    found = {name: in_turns({"passes": passes, "tiles": tiles}, rounds) for name, (passes, tiles) in ways.items()}
    return {name: {way: 1e3 * seconds for way, seconds in row.items()} for name, row in found.items()}


def step(model: Path, scratch: str, dtype: str, options: Options) -> dict[str, float]:
    """Seconds of forward and backward, and GiB of the process after it."""
    actor = Actor(scratch, model=str(model), dtype=dtype)
    torch.set_num_threads(1)
    lengths = [24 + 7 * row % 25 for row in range(options.responses)]
    batch = make_batch(lengths)
    calls = {name: lambda n=name: by(n, lambda: actor.step(batch)) for name in LIBRARIES}
    found = in_turns(calls if dtype == "float32" else {"step": lambda: actor.step(batch)}, 3)
    found["tokens"] = sum(lengths) + PROMPT_TOKENS * len(lengths)
    found["held_gib"] = psutil.Process().memory_info().rss / GIB
    return_free_memory()
    found["returned_gib"] = psutil.Process().memory_info().rss / GIB
    return found


def main() -> None:
    """Prints the tables, and writes them."""
    options = tyro.cli(Options, description=__doc__)
    torch.set_num_threads(1)
    rows: dict[str, Any] = {"processor": torch.cpu.get_capabilities()["cpu_name"], "load": os.getloadavg()[0]}
    if "products" in options.tables:
        rows["products_gflops"] = {f"{h}x{ffn}": products(h, ffn, options.rounds) for h, ffn in LAYERS}
    if "attention" in options.tables:
        rows["attention_ms"] = {f"{n}x{length}": attention(length, n, options.rounds) for length, n in SEQUENCES}
    if "functions" in options.tables:
        keep_free_memory()
        for dtype in (torch.float32, torch.bfloat16):
            rows[f"functions_{str(dtype).removeprefix('torch.')}_ms"] = {
                f"{sizes[0]}x{sizes[1]}": functions(*sizes, dtype, options.rounds) for sizes in FUNCTIONS
            }
    for dtype in ("float32", "bfloat16") if "step" in options.tables else ():
        # a process each: Megatron's groups are made once, and the memory of the one is not the other's
        with tempfile.TemporaryDirectory() as scratch:
            make_model(Path(scratch) / "model", SIZES["smollm2"], "cpu")
            context = torch.multiprocessing.get_context("spawn")
            with context.Pool(1) as pool:
                rows[f"step_{dtype}"] = pool.apply(step, (Path(scratch) / "model", scratch, dtype, options))
    print(json.dumps(rows, indent=2))
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
