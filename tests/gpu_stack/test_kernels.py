"""The Triton kernels, compiled for H100 and B200 without either: registers, spills, and how they load.

python -m tests.gpu_stack.test_kernels      # the table
"""

import itertools
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from gtpo_megatron.kernels import partials
from gtpo_megatron.kernels.partials import SoftmaxSums

ARCHITECTURES = {90: "H100", 100: "B200"}
THREADS_PER_MULTIPROCESSOR = 2048
REGISTERS_PER_MULTIPROCESSOR = 65536
LEAST_OCCUPANCY = 0.5
"""Of the threads that a multiprocessor can hold: four programs of 256, whose loads are on their way side by side."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A kernel, with what it is launched with."""

    kernel: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What the assembler says of a kernel.

    Attributes:
        registers: of a thread.
        spilled: bytes of a thread's registers that are in memory, and of its stack.
        shared: bytes of shared memory.
        wide_loads: loads of 16 bytes a thread.
        narrow_loads: other loads of vectors and scalars.
        threads: of a program.
    """

    registers: int
    spilled: int
    shared: int
    wide_loads: int
    narrow_loads: int
    threads: int

    @property
    def occupancy(self) -> float:
        """Part of a multiprocessor's threads that registers leave room for."""
        programs = REGISTERS_PER_MULTIPROCESSOR // (self.registers * self.threads)
        return min(1.0, programs * self.threads / THREADS_PER_MULTIPROCESSOR)


class _Recorder:
    """Stands for a kernel: ``kernel[grid](...)`` is noted, not run."""

    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self._kernel, self._launches = kernel, launches

    def __getitem__(self, grid: Any) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            self._launches.append(Launch(kernel=self._kernel, arguments=arguments, options=options))

        return launch


def launches(columns: int, *, temperature: bool, entropy: bool, dtype: torch.dtype) -> list[Launch]:
    """What the two functions launch for a tile of logits, whose gradient has ``dtype``."""
    from gtpo_megatron.kernels import triton_tiles

    rows, noted = 1024, []
    kernels = {name: kernel for name, kernel in vars(triton_tiles).items() if name.endswith("_kernel")}
    with (
        mock.patch.multiple(triton_tiles, **{name: _Recorder(kernel, noted) for name, kernel in kernels.items()}),
        torch.device("meta"),
    ):
        logits, row = torch.empty(rows, columns), torch.empty(rows)
        targets = torch.empty(rows, dtype=torch.int64)
        scale = row if temperature else None
        out = torch.empty(partials.NUM_FIELDS, rows)
        triton_tiles.reduce_tile(logits, targets, scale, out, owned=True, may_mask=False)
        gradient = torch.empty(rows, columns, dtype=dtype)
        triton_tiles.gradient_tile(
            logits, targets, scale, SoftmaxSums(row, row, row), row, row if entropy else None, gradient, may_mask=False
        )
    assert {launch.kernel for launch in noted} == set(kernels.values())
    return noted


def compile_for(launch: Launch, architecture: int) -> Compiled:
    """As Triton specialises on arguments: sizes that 16 divides and addresses are known to be so."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int64: "*i64"}
    parameters = launch.kernel.arg_names
    options = dict(launch.options)
    constants = {name: options.pop(name) for name in parameters if name in options}
    signature, attributes = {}, {}
    for index, (name, value) in enumerate(zip(parameters, launch.arguments, strict=False)):
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
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        code = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", usage)}
    loads = re.findall(r"LDG\.E\S*", code)
    return Compiled(
        registers=found["REG"],
        spilled=found["STACK"] + found["LOCAL"],
        shared=found["SHARED"],
        wide_loads=sum(".128" in load for load in loads),
        narrow_loads=sum(".128" not in load for load in loads),
        threads=32 * options["num_warps"],
    )


COLUMNS = {"aligned": 32768, "odd": 38017}
"""Of a tile, and of one whose rows are not aligned: a narrower last tile of an odd share of a vocabulary."""


def cases() -> Iterator[tuple[str, bool, bool]]:
    return itertools.product(COLUMNS, (False, True), (False, True))


@pytest.mark.timeout(300)  # a minute of assembling on one core
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_keep_to_registers(architecture):
    """No spills, and few enough of them that a multiprocessor holds several programs."""
    for columns, temperature, entropy in cases():
        for launch in launches(COLUMNS[columns], temperature=temperature, entropy=entropy, dtype=torch.bfloat16):
            found = compile_for(launch, architecture)
            told = f"{launch.kernel.__name__} {columns} temperature={temperature} entropy={entropy}: {found}"
            assert found.spilled == 0, told
            assert found.occupancy >= LEAST_OCCUPANCY, told
            if columns == "aligned":  # logits are read 16 bytes at a time
                assert found.wide_loads > 0, told


def main() -> None:
    for architecture, (columns, temperature, entropy) in itertools.product(ARCHITECTURES, cases()):
        for launch in launches(COLUMNS[columns], temperature=temperature, entropy=entropy, dtype=torch.bfloat16):
            found = compile_for(launch, architecture)
            options = f"{columns}{' temperature' * temperature}{' entropy' * entropy}"
            print(f"sm_{architecture} {launch.kernel.__name__:18} {options:28} {found} {found.occupancy:.0%}")


if __name__ == "__main__":
    main()
