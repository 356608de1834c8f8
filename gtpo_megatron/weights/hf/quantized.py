"""Quantized tensors of a folder, read box by box as bfloat16.

Products are taken in float32 and rounded once, as transformers and compressed-tensors do, so the bits are theirs:

- FP8: ``w[r, c] = q[r, c] s[r // m, c // n]``, ``m x n`` being the block of a scale; blocks at the edges may be cut;
- MXFP4: ``w[r, 32 g + k] = E2M1[q[r, g, k]] 2^(e[r, g] - 127)``, two values a byte, the lower half first;
- packed integers of ``b`` bits: ``w[r, c] = (q[r, c] - 2^(b-1)) s[r, c // group]``, ``32 / b`` in an int32, the first
  in the lowest bits.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from gtpo_megatron.errors import WeightMappingError
from gtpo_megatron.weights.quantization import Quantization

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Of E2M1, by its four bits."""

MX_GROUP = 32
"""Values that share an exponent in MXFP4."""

RAW_DTYPES = frozenset({"F8_E4M3", "F8_E8M0", "U8", "I32", "I64"})
"""Safetensors' names of what quantized weights and their scales are stored in, beside floats."""


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor as it is stored: its file, its name there, safetensors' dtype and shape."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]


Open = Callable[[str], Any]
"""Safetensors' slices of a stored tensor, by its name."""


class Packed(Protocol):
    """How a matrix is stored."""

    def read(self, opened: Open, rows: slice, columns: slice, *, expert: int = 0) -> Tensor:
        """Some of it as bfloat16, ``[rows, columns]``; of a tensor of all experts, of one of them."""
        ...


@dataclass(frozen=True, slots=True)
class ScaledFloats:
    """FP8 with scales.

    Attributes:
        weight: name of the numbers.
        scale: name of their scales.
        block: rows and columns that share one; a size is 0 if all of the dimension do.
        scale_ndim: dims of the scales.
    """

    weight: str
    scale: str
    block: tuple[int, int]
    scale_ndim: int

    def read(self, opened: Open, rows: slice, columns: slice, *, expert: int = 0) -> Tensor:
        """See `Packed`."""
        del expert
        values: Tensor = opened(self.weight)[rows, columns].float()
        return values.mul_(self._scales(opened(self.scale), rows, columns)).to(torch.bfloat16)

    def _scales(self, stored: Any, rows: slice, columns: slice) -> Tensor:
        """Broadcast to the box."""
        if self.scale_ndim < 2:
            found: Tensor = stored[rows if self.block[0] else ...].float()
            return found.reshape(-1, 1)
        needed = [
            slice(part.start // size, -(-part.stop // size)) if size else slice(0, 1)
            for part, size in zip((rows, columns), self.block, strict=True)
        ]
        scales: Tensor = stored[needed[0], needed[1]].float()
        for dim, (part, size) in enumerate(zip((rows, columns), self.block, strict=True)):
            if size > 1:
                first = part.start % size
                scales = scales.repeat_interleave(size, dim).narrow(dim, first, part.stop - part.start)
        return scales


@dataclass(frozen=True, slots=True)
class MicroscaledExperts:
    """MXFP4 of all experts of a layer, ``blocks [experts, rows, groups, 16]`` and ``scales [experts, rows, groups]``.

    Attributes:
        blocks: name of the values.
        scales: name of the exponents.
    """

    blocks: str
    scales: str

    def read(self, opened: Open, rows: slice, columns: slice, *, expert: int = 0) -> Tensor:
        """See `Packed`."""
        groups = slice(columns.start // MX_GROUP, -(-columns.stop // MX_GROUP))
        one = slice(expert, expert + 1)
        stored = opened(self.blocks)[one, rows, groups][0]
        exponents = opened(self.scales)[one, rows, groups][0].to(torch.int32) - 127
        table = torch.tensor(VALUES)
        values = torch.stack((table[(stored & 15).long()], table[(stored >> 4).long()]), dim=-1).flatten(-2)
        found = torch.ldexp(values, exponents[..., None]).flatten(-2)
        first = columns.start - groups.start * MX_GROUP
        return found[:, first : first + columns.stop - columns.start].to(torch.bfloat16)


@dataclass(frozen=True, slots=True)
class PackedIntegers:
    """Symmetric integers, packed along rows.

    Attributes:
        packed: name of the int32 ``[rows, ceil(columns * bits / 32)]``.
        scale: name of the scales ``[rows, columns / group]``.
        num_bits: of an integer.
        group: columns that share a scale.
    """

    packed: str
    scale: str
    num_bits: int
    group: int

    def read(self, opened: Open, rows: slice, columns: slice, *, expert: int = 0) -> Tensor:
        """See `Packed`."""
        del expert
        per_word = 32 // self.num_bits
        words = slice(columns.start // per_word, -(-columns.stop // per_word))
        stored = opened(self.packed)[rows, words]
        shifts = torch.arange(0, 32, self.num_bits, dtype=torch.int32)
        values: Tensor = ((stored[..., None] >> shifts) & ((1 << self.num_bits) - 1)).flatten(-2)
        first = columns.start - words.start * per_word
        values = values[:, first : first + columns.stop - columns.start] - (1 << (self.num_bits - 1))
        groups = slice(columns.start // self.group, -(-columns.stop // self.group))
        scales = opened(self.scale)[rows, groups].float().repeat_interleave(self.group, 1)
        first = columns.start - groups.start * self.group
        found: Tensor = values * scales[:, first : first + columns.stop - columns.start]
        return found.to(torch.bfloat16)


def quantized_tensors(
    stored: Mapping[str, RawTensor], how: Quantization
) -> tuple[dict[str, tuple[tuple[int, ...], Packed]], set[str]]:
    """The matrices that a folder has quantized.

    Args:
        stored: all of its tensors.
        how: how it says that they are.

    Returns:
        Shape and form of each matrix by the name that an unquantized folder has for it; and the names of all stored
        tensors that belong to them.

    Raises:
        WeightMappingError: one has no scale, or a scale of another shape.
    """
    found: dict[str, tuple[tuple[int, ...], Packed]] = {}
    used: set[str] = set()
    read = {"fp8": _scaled, "mxfp4": _microscaled, "packed": _packed}[how.kind]
    for name, tensor in stored.items():
        if (one := read(name, tensor, stored, how)) is not None:
            whole, shape, form, names = one
            found[whole] = shape, form
            used |= names
    return found, used


_Found = tuple[str, tuple[int, ...], Packed, set[str]] | None


def _scaled(name: str, tensor: RawTensor, stored: Mapping[str, RawTensor], how: Quantization) -> _Found:
    if tensor.dtype != "F8_E4M3" or not name.endswith(".weight") or len(tensor.shape) != 2:
        return None
    names = [f"{name}_scale_inv", f"{name}_scale"]
    scale = next((one for one in names if one in stored), None)
    if scale is None:
        raise WeightMappingError(f"{tensor.path}: {name} is FP8 and has no scale: neither {names[0]} nor {names[1]}")
    rows, columns = tensor.shape
    shape = stored[scale].shape
    if len(shape) == 2 and how.block is not None:
        block = how.block
        wanted = -(-rows // block[0]), -(-columns // block[1])
    else:  # one for the tensor, or one for each row
        block = (1, 0) if shape in ((rows,), (rows, 1)) and rows > 1 else (0, 0)
        wanted = (rows, 1)
    if shape != wanted and (how.block is not None or shape not in ((), (1,), (1, 1), (rows,))):
        raise WeightMappingError(f"{stored[scale].path}: {scale} has shape {shape}, expected {wanted} for {name}")
    other = {f"{name.removesuffix('weight')}input_scale"} & stored.keys()  # of activations, which are not quantized
    return name, tensor.shape, ScaledFloats(name, scale, block, len(shape)), {name, scale, *other}


def _microscaled(name: str, tensor: RawTensor, stored: Mapping[str, RawTensor], how: Quantization) -> _Found:
    del how
    if not name.endswith("_blocks"):
        return None
    whole = name.removesuffix("_blocks")
    scales = f"{whole}_scales"
    if tensor.dtype != "U8" or len(tensor.shape) != 4 or tensor.shape[3] * 2 != MX_GROUP:
        raise WeightMappingError(
            f"{tensor.path}: {name} is {tensor.dtype} {tensor.shape}; expected U8 [.., .., .., 16]"
        )
    if scales not in stored or stored[scales].shape != tensor.shape[:3]:
        shape = stored[scales].shape if scales in stored else "none"
        raise WeightMappingError(f"{tensor.path}: {scales} has shape {shape}, expected {tensor.shape[:3]}")
    experts, rows, groups, _ = tensor.shape
    # transformers and the tables have it turned
    return whole, (experts, groups * MX_GROUP, rows), MicroscaledExperts(name, scales), {name, scales}


def _packed(name: str, tensor: RawTensor, stored: Mapping[str, RawTensor], how: Quantization) -> _Found:
    if not name.endswith(".weight_packed"):
        return None
    whole = name.removesuffix("_packed")
    scale, sizes = f"{whole}_scale", f"{whole}_shape"
    if scale not in stored or len(stored[scale].shape) != 2 or len(tensor.shape) != 2:
        raise WeightMappingError(f"{tensor.path}: {name} {tensor.shape} has no matrix {scale} of scales")
    per_word, groups = 32 // how.num_bits, stored[scale].shape[1]
    columns = tensor.shape[1] * per_word
    if stored[scale].shape[0] != tensor.shape[0] or columns % groups:
        found = stored[scale]
        raise WeightMappingError(f"{found.path}: {scale} {found.shape} does not fit to {name} {tensor.shape}")
    form = PackedIntegers(name, scale, how.num_bits, columns // groups)
    return whole, (tensor.shape[0], columns), form, {name, scale, *({sizes} & stored.keys())}
