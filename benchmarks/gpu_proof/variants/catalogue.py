"""What is measured: the candidates of both passes, the most promising first."""

import importlib.util
import os
from dataclasses import replace
from typing import Any

from benchmarks.gpu_proof.variants.candidate import PASSES, Candidate, Pass
from benchmarks.gpu_proof.variants.turns import Turns

TILE = 1 << 25
"""Logits of a tile of the present way: 128 MiB in float32."""


def has_triton(device_type: str) -> bool:
    """Whether its kernels can run here: on a GPU, or under the interpreter."""
    is_there = importlib.util.find_spec("triton") is not None
    return is_there and (device_type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")


def candidates(device_type: str, *, small: bool) -> dict[Pass, list[Candidate]]:
    """By pass: ``scores``, and ``training``, which is both.

    Args:
        device_type: ``cuda`` or ``cpu``; without Triton there are only those that need none.
        small: one of each idea, with sizes that suit a few hundred logits.
    """
    if small:
        return _small(device_type)
    found: dict[Pass, list[Candidate]] = {name: [Candidate(name="present")] for name in PASSES}
    for name, plan in _turns(device_type).items():
        found["scores"].append(Candidate(name=name, partials=plan.partials))
    for name, plan in _training_turns(device_type).items():
        found["training"].append(Candidate(name=name, partials=plan.partials, gradients=plan.gradients))
    if has_triton(device_type):
        from benchmarks.gpu_proof.variants.epilogue import Epilogue

        for blocks in _blocks():
            way = Epilogue(scores=blocks, gradient=blocks)
            found["scores"].append(
                Candidate(name=f"epilogue {blocks}", partials=way.partials, stage=2 if blocks.specialize else 1)
            )
        for blocks in _gradient_blocks():
            for elements, chunk in ((1 << 26, 4096), (1 << 27, 8192)):
                way = Epilogue(scores=blocks, gradient=blocks, gradient_elements=elements, chunk_tokens=chunk)
                name = f"epilogue {blocks}, {chunk} tokens, gradients of {elements >> 19} MiB"
                found["training"].append(Candidate(name=name, partials=way.partials, gradients=way.gradients, stage=1))
    return found


def _lean(**sizes: Any) -> dict[str, Any]:
    """Options of `Turns`, with the leaner kernels."""
    from benchmarks.gpu_proof.variants.lean import LeanKernels
    from benchmarks.gpu_proof.variants.merging import merge

    return {"kernels": LeanKernels(**sizes).kernels(), "merge": merge}


def _turns(device_type: str) -> dict[str, Turns]:
    """Of the forward pass. A tile has 128 MiB of logits where nothing is said."""
    found = {"two streams, present kernels": Turns(tile_elements=TILE, buffers=2)}
    if not has_triton(device_type):
        return found
    lean, one = _lean(), Turns(tile_elements=TILE, **_lean())
    found |= {
        "lean": one,
        "lean, 4,096 columns": replace(one, **_lean(reduce_columns=4096)),
        "lean, 16 warps": replace(one, **_lean(reduce_warps=16)),
        "lean, two streams": replace(one, buffers=2),
        "lean, two streams, cuBLASLt": replace(one, buffers=2, is_lt=True),
        "lean, two streams, products first": replace(one, buffers=2, is_reader_first=False),
    }
    for programs in (16, 32, 64):
        narrow = replace(one, buffers=2, **_lean(reduce_warps=16, programs=programs))
        found[f"lean, two streams, {programs} programs"] = narrow
    for carved in (8, 16):
        narrow = replace(one, buffers=2, carved=carved, **_lean(reduce_warps=16, programs=2 * carved))
        found[f"lean, two streams, {carved} multiprocessors carved out"] = narrow
    for mib, chunk in ((256, 8192), (16, 2048), (32, 4096), (64, 4096)):
        plan = Turns(tile_elements=mib << 18, chunk_tokens=chunk, **lean)
        found[f"lean, tiles of {mib} MiB, {chunk} tokens"] = plan
        found[f"lean, two streams, tiles of {mib} MiB, {chunk} tokens"] = replace(plan, buffers=2)
    narrow = Turns(tile_elements=256 << 18, chunk_tokens=8192, buffers=2, **_lean(reduce_warps=16, programs=32))
    found["lean, two streams, 32 programs, tiles of 256 MiB, 8192 tokens"] = narrow
    return found


def _training_turns(device_type: str) -> dict[str, Turns]:
    """Of both passes; gradients in bfloat16 are as wide as a tile where nothing is said."""
    found = {"two streams, present kernels": Turns(tile_elements=TILE, buffers=2)}
    if not has_triton(device_type):
        return found
    one = Turns(tile_elements=TILE, **_lean())
    found |= {
        "lean": one,
        "lean, two streams": replace(one, buffers=2),
        "lean, two streams, cuBLASLt": replace(one, buffers=2, is_lt=True),
        "lean, gradients of 128 MiB": replace(one, wide_elements=1 << 26),
        "lean, two streams, tiles of 64 MiB, gradients of 64 MiB": replace(
            one, buffers=2, tile_elements=TILE // 2, wide_elements=TILE
        ),
        "lean, two streams, gradients of 128 MiB": replace(one, buffers=2, wide_elements=1 << 26),
        "lean, two streams, 32 programs": replace(one, buffers=2, **_lean(reduce_warps=16, programs=32)),
    }
    whole = replace(one, chunk_tokens=8192, wide_elements=1 << 27)
    found |= {
        "lean, 8192 tokens, gradients of 256 MiB": whole,
        "lean, two streams, 8192 tokens, gradients of 256 MiB": replace(whole, buffers=2),
        "lean, two streams, 32 programs, 8192 tokens, gradients of 256 MiB": replace(
            whole, buffers=2, **_lean(reduce_warps=16, programs=32)
        ),
    }
    for mib in (16, 32):
        plan = replace(one, tile_elements=mib << 18, wide_elements=1 << 26)
        found[f"lean, tiles of {mib} MiB, gradients of 128 MiB"] = plan
        found[f"lean, two streams, tiles of {mib} MiB, gradients of 128 MiB"] = replace(plan, buffers=2)
    return found


def _blocks() -> list[Any]:
    """Of the kernel with its reduction in the epilogue."""
    from benchmarks.gpu_proof.variants.epilogue import Blocks

    one = Blocks()
    return [
        one,
        replace(one, stages=4),
        replace(one, group_m=16),
        replace(one, m=256, n=128),
        replace(one, stages=4, group_m=16),
        replace(one, k=128, stages=2),
        replace(one, n=128, stages=4),
        replace(one, n=128, warps=4, programs=2),
        replace(one, warps=4, specialize=True),
        replace(one, warps=4, stages=4, specialize=True),
        replace(one, warps=4, stages=4, specialize=True, group_m=16),
    ]


def _gradient_blocks() -> list[Any]:
    """Of both kernels together."""
    from benchmarks.gpu_proof.variants.epilogue import Blocks

    one = Blocks()
    return [one, replace(one, stages=4), replace(one, m=256, n=128), replace(one, n=128, stages=4)]


def _small(device_type: str) -> dict[Pass, list[Candidate]]:
    plans = {"two streams, present kernels": Turns(tile_elements=1 << 14, buffers=2, wide_elements=1 << 15)}
    ways: dict[str, Any] = dict(plans)
    if has_triton(device_type):
        from benchmarks.gpu_proof.variants.epilogue import Blocks, Epilogue

        small = Turns(tile_elements=1 << 15, buffers=2, **_lean(programs=4))
        blocks = Blocks(m=32, n=256, k=32)
        ways |= {"lean, two streams": small, "epilogue": Epilogue(scores=blocks, gradient=blocks)}
    found: dict[Pass, list[Candidate]] = {name: [Candidate(name="present")] for name in PASSES}
    for name, way in ways.items():
        stage = 1 if name == "epilogue" else 0
        found["scores"].append(Candidate(name=name, partials=way.partials, stage=stage))
        found["training"].append(Candidate(name=name, partials=way.partials, gradients=way.gradients, stage=stage))
    return found
