"""The kernels of other ways to compute the output layer: compiled for an H100 without one, and interpreted.

python -m tests.gpu_stack.test_variants      # the table; then the comparison, under the interpreter
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from gtpo_megatron.distributed import vocab_parallel
from gtpo_megatron.distributed.tiled_scores import ScoreTask
from gtpo_megatron.kernels import partials
from gtpo_megatron.kernels.partials import SoftmaxSums
from gtpo_megatron.kernels.tiles import TileKernels
from tests.gpu_stack.test_head import Watch, fake_kernels, inputs
from tests.gpu_stack.test_kernels import Launch, _Recorder

ROOT = Path(__file__).parents[2]

SHARED_BYTES = 227 << 10
"""Of a program on an H100."""

HIDDEN, VOCAB, TOKENS = 3584, 152064, 8192
"""Of 7B, the whole vocabulary."""


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What the assembler says of a kernel.

    Attributes:
        registers: of a thread.
        spilled: bytes of a thread's registers that are in memory, and of its stack.
        shared: bytes of shared memory.
        threads: of a program.
        tensor_core_products: in its code.
        waits_for_each: every product is waited for before the next, since the accumulator is touched between.
        loads_apart: in warps of their own.
    """

    registers: int
    spilled: int
    shared: int
    threads: int
    tensor_core_products: int
    waits_for_each: bool
    loads_apart: bool


def recorded(module: Any, call: Any) -> Iterator[Launch]:
    """What ``call`` launches of a module's kernels, with tensors that have no data."""
    noted: list[Launch] = []
    kernels = {name: value for name, value in vars(module).items() if name.endswith("_kernel")}
    stand_ins = {name: _Recorder(one, noted) for name, one in kernels.items()}
    with mock.patch.multiple(module, **stand_ins), torch.device("meta"):
        call()
    return iter(noted)


def compile_for_h100(launch: Launch) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.tools.tensor_descriptor import TensorDescriptor

    names = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int64: "*i64", torch.float64: "*fp64"}
    parameters, options = launch.kernel.arg_names, dict(launch.options)
    constants = {name: options.pop(name) for name in parameters if name in options}
    signature, attributes = {}, {}
    for index, (name, value) in enumerate(zip(parameters, launch.arguments, strict=False)):
        if isinstance(value, TensorDescriptor):
            signature[name] = f"tensordesc<{names[value.base.dtype][1:]}{list(value.block_shape)}>"
            continue
        is_tensor = isinstance(value, torch.Tensor)
        signature[name] = names[value.dtype] if is_tensor else "i32"
        if is_tensor or value % 16 == 0:
            attributes[index,] = [["tt.divisibility", 16]]
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        launch.kernel,
        signature,
        constexprs={(parameters.index(name),): value for name, value in constants.items()},
        attrs=attributes,
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        code, text = Path(folder, "kernel.cubin"), Path(folder, "kernel.ptx")
        code.write_bytes(compiled.asm["cubin"])
        text.write_text(compiled.asm["ptx"])
        usage = _said(tools / "cuobjdump", "-res-usage", code)
        remarks = _said(tools / "ptxas", "-v", "--gpu-name=sm_90a", text, "-o", os.devnull)
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return Compiled(
        registers=found["REG"],
        spilled=found["STACK"] + found["LOCAL"],
        shared=compiled.metadata.shared,
        threads=32 * compiled.metadata.num_warps,
        tensor_core_products=compiled.asm["ptx"].count("wgmma.mma_async"),
        waits_for_each="wgmma.mma_async instructions are serialized" in remarks,
        loads_apart="ttg.warp_specialize(" in compiled.asm["ttgir"],
    )


def _said(*command: Any) -> str:
    done = subprocess.run([str(one) for one in command], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def task(temperature: bool, *, entropy: bool = False, device: str = "meta") -> ScoreTask:
    return ScoreTask(
        target_ids=torch.empty(TOKENS, dtype=torch.int64, device=device),
        inverse_temperature=torch.empty(TOKENS, dtype=torch.float64, device=device) if temperature else 1.0,
        vocab_size=VOCAB,
        entropy_grad=entropy,
        tp_group=None,
    )


def tile_launches(sizes: Any, *, temperature: bool, entropy: bool) -> Iterator[Launch]:
    """Of the leaner kernels on the tile of 4,096 tokens, and of the merge."""
    from benchmarks.gpu_proof.variants import lean, merging

    def tile() -> None:
        logits, row = torch.empty(4096, 8192), torch.empty(4096)
        targets, scale = torch.empty(4096, dtype=torch.int64), row if temperature else None
        out, gradient = torch.empty(partials.NUM_FIELDS, 4096), torch.empty(4096, 8192, dtype=torch.bfloat16)
        grad_entropy = row if entropy else None
        sizes.reduce(logits, targets, scale, out, owned=True, may_mask=False)
        sizes.gradient(logits, targets, scale, SoftmaxSums(row, row, row), row, grad_entropy, gradient, may_mask=False)

    yield from recorded(lean, tile)
    inverse = task(temperature).inverse_temperature
    yield from recorded(merging, lambda: merging.merge(torch.empty(594, 4, TOKENS), inverse))


def block_launches(blocks: Any, *, temperature: bool, entropy: bool) -> Iterator[Launch]:
    """Of the kernels with an epilogue; the gradient's once, not for each chunk and block of columns."""
    from benchmarks.gpu_proof.variants import epilogue

    way = epilogue.Epilogue(scores=blocks, gradient=blocks, gradient_elements=1 << 26)

    def both() -> None:
        asked = task(temperature, entropy=entropy)
        hidden = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16)
        weight = torch.empty(VOCAB, HIDDEN, dtype=torch.bfloat16)
        row = torch.empty(TOKENS)
        with mock.patch.object(epilogue, "merge"):
            way.partials(hidden, weight, asked, 4096)
        way.gradients(
            hidden,
            weight,
            asked,
            4096,
            SoftmaxSums(row, row, row),
            (row, row if entropy else None),
            hidden_grad=False,
            weight_grad=None,
            reduce_hidden_grad=False,
        )

    scores, gradient, *_ = recorded(epilogue, both)
    yield scores
    if not blocks.specialize:
        yield gradient


def lean_sizes() -> list[Any]:
    from benchmarks.gpu_proof.variants.lean import LeanKernels

    sizes = LeanKernels(), LeanKernels(reduce_columns=4096), LeanKernels(reduce_warps=16, programs=32)
    return [*sizes]


def all_blocks() -> list[Any]:
    from benchmarks.gpu_proof.variants import catalogue

    return [*dict.fromkeys([*catalogue._blocks(), *catalogue._gradient_blocks()])]


def check(launch: Launch, found: Compiled) -> None:
    assert found.spilled == 0, f"{launch.kernel.__name__} {launch.options}: {found}"
    assert found.shared <= SHARED_BYTES, f"{launch.kernel.__name__} {launch.options}: {found}"
    assert found.loads_apart == bool(launch.options.get("SPECIALIZE")), f"{launch.options}: {found}"
    assert not found.waits_for_each, f"{launch.kernel.__name__} {launch.options}: {found}"
    if "BLOCK_M" in launch.options:
        assert found.tensor_core_products > 0, f"{launch.options}: {found}"


@pytest.mark.timeout(300)
def test_leaner_kernels_compile_for_an_h100():
    for sizes in lean_sizes():
        for temperature, entropy in ((False, False), (True, True)):
            for launch in tile_launches(sizes, temperature=temperature, entropy=entropy):
                check(launch, compile_for_h100(launch))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", range(11))
def test_kernels_with_an_epilogue_compile_for_an_h100(number):
    blocks = all_blocks()
    assert len(blocks) == 11
    for launch in block_launches(blocks[number], temperature=True, entropy=False):
        if launch.options.get("SPECIALIZE") and not version("triton").startswith("3.6."):
            pytest.skip("Triton 3.7 refuses loads in warps of their own from these descriptors; 3.6 takes them")
        check(launch, compile_for_h100(launch))


@pytest.mark.parametrize(
    ("tile", "wide", "chunk"), [(1 << 25, 0, 0), (1 << 23, 1 << 26, 0), (1 << 26, 0, 8192)], ids=str
)
def test_tiles_of_a_gpu_hold_what_they_say_and_never_wait(tile, wide, chunk):
    """On tensors that say they are a GPU's: operands are bfloat16, sums float32, and memory is that of the buffers."""
    from benchmarks.gpu_proof.variants import turns
    from benchmarks.gpu_proof.variants.candidate import Candidate, adopted

    plan = turns.Turns(tile_elements=tile, wide_elements=wide, chunk_tokens=chunk)
    dtypes = set()
    kernels = TileKernels(
        reduce=lambda *given, **_: dtypes.add(("reduce", given[0].dtype, given[3].dtype)),
        gradient=lambda *given, **_: dtypes.add(("gradient", given[0].dtype, given[6].dtype)),
    )
    # torch 2.11 cannot follow the shapes of addmm with another output dtype
    add = mock.patch.object(
        turns.present, "_add_matmul_", lambda *given: dtypes.add(("product", *(one.dtype for one in given)))
    )
    candidate = Candidate(name="turns", partials=plan.partials, gradients=plan.gradients)
    with fake_kernels(), mock.patch.object(turns, "kernels_for", return_value=kernels), add, adopted(candidate):
        hidden, weight, targets = inputs()
        with Watch() as forward:
            scores = vocab_parallel.linear_token_scores(hidden, weight, targets, temperature=0.7, chunk_tokens=4096)
        with Watch() as backward:
            scores.logprobs.grad_fn.apply(torch.empty(scores.logprobs.shape, device="cuda"), None)
    assert forward.waits + backward.waits == []
    assert dtypes == {
        ("reduce", torch.float32, torch.float32),
        ("gradient", torch.float32, torch.bfloat16),
        ("product", torch.float32, torch.bfloat16, torch.bfloat16),
    }
    room = 16 << 20
    assert 4 * tile <= forward.peak < 4 * tile + room
    results = 2 * hidden.numel() + 2 * weight.numel()  # hidden's, and the zeros that autograd gets for the weight
    temporaries = 4 * tile + 2 * max(tile, wide) + 2 * 4 * (chunk or 4096) * hidden.shape[1]
    assert backward.peak < results + temporaries + room


# ------------------------------------------------------------------------------------------------ under the interpreter
def compare() -> None:
    """Each way against the present one: temperatures, an odd vocabulary, the entropy's gradient, ranks."""
    from benchmarks.gpu_proof.variants.candidate import Candidate, adopted
    from benchmarks.gpu_proof.variants.epilogue import Blocks, Epilogue
    from benchmarks.gpu_proof.variants.lean import LeanKernels
    from benchmarks.gpu_proof.variants.merging import merge
    from benchmarks.gpu_proof.variants.turns import Turns
    from tests.unit.tools.test_variants import Shard, passed, task_of

    kernels = LeanKernels(programs=4, reduce_columns=256, gradient_columns=128).kernels()
    blocks = Blocks(m=16, n=128, k=16)
    straight = Epilogue(scores=Blocks(m=16, n=128, k=16, specialize=True), gradient=blocks)
    ways = {
        "lean": Turns(tile_elements=1 << 14, buffers=2, kernels=kernels, merge=merge),
        "epilogue": Epilogue(scores=blocks, gradient=blocks, gradient_elements=1 << 14),
        "without branches": straight,
    }
    for name, way in ways.items():
        candidate = Candidate(name=name, partials=way.partials, gradients=way.gradients)
        for temperature, entropy_grad in ((torch.linspace(0.5, 2.0, 35), True), (1.0, False)):
            wanted = passed(Candidate(name="present"), temperature, entropy_grad=entropy_grad)
            found = passed(candidate, temperature, entropy_grad=entropy_grad)
            for one, other in zip(found, wanted, strict=True):
                torch.testing.assert_close(one, other, rtol=3e-5, atol=2e-5, msg=lambda m, at=name: f"{at}: {m}")
        _compare_ranks(way, Shard, task_of)
        with adopted(candidate):
            _compare_sharp(name)


def _compare_ranks(way: Any, shard: Any, task_of: Any) -> None:
    from gtpo_megatron.distributed import tiled_scores

    torch.manual_seed(1)
    hidden, weight, targets = torch.randn(20, 16), torch.randn(1400, 16), torch.randint(0, 1391, (20,))
    whole = tiled_scores.linear_partials(hidden, weight, ScoreTask(**task_of(targets)), 16)
    parts = [
        way.partials(hidden, weight[first : first + 700], shard(**task_of(targets), first=first), 16)
        for first in (0, 700)
    ]
    torch.testing.assert_close(partials.merge(torch.stack(parts), 0.8), whole, rtol=3e-5, atol=3e-5)


def _compare_sharp(name: str) -> None:
    """Tokens with nearly all the mass on one logit, or on two equal ones; logits that are no number."""
    from gtpo_megatron.distributed.vocab_parallel import linear_token_scores

    hidden, weight = torch.zeros(20, 16), torch.zeros(300, 16)
    hidden[:, 0] = torch.linspace(1.0, 30.0, 20)
    weight[:, 1] = torch.linspace(-1.0, 1.0, 300)
    hidden[:, 1] = 0.5
    weight[7, 0] = 1.0
    twice = weight.clone()
    twice[207] = twice[7]
    for one in (weight, twice):
        scores = linear_token_scores(hidden, one, torch.full((20,), 7), check_inputs=False)
        log_p = torch.log_softmax(hidden.double() @ one.double().T, dim=1)
        entropy = -(log_p.exp() * log_p).sum(1)
        told = f"{name}: {scores.entropy} {entropy}"
        assert torch.allclose(scores.entropy.double(), entropy, rtol=5e-6, atol=0.0), told
        assert torch.allclose(scores.logprobs.double(), log_p[:, 7], rtol=5e-6, atol=1e-12), told
    hidden[3, 0] = torch.nan
    broken = linear_token_scores(hidden, weight, torch.full((20,), 7), check_inputs=False).entropy
    assert broken.isnan().nonzero().flatten().tolist() == [3], name


@pytest.mark.timeout(300)
def test_each_way_equals_the_present_one_under_the_interpreter():
    command = "import tests.gpu_stack.test_variants as m; m.compare(); print('compared')"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.strip() == "compared"


def main() -> None:
    for sizes in lean_sizes():
        for launch in tile_launches(sizes, temperature=True, entropy=True):
            found = compile_for_h100(launch)
            print(f"{launch.kernel.__name__:18} {launch.options} {found}", flush=True)
            check(launch, found)
    for blocks in all_blocks():
        for launch in block_launches(blocks, temperature=True, entropy=False):
            found = compile_for_h100(launch)
            print(f"{launch.kernel.__name__:18} {blocks} {found}", flush=True)
            check(launch, found)
    test_each_way_equals_the_present_one_under_the_interpreter()
    print("under the interpreter each way equals the present one")


if __name__ == "__main__":
    main()
