"""Converts a GGUF file to a folder in Hugging Face format.

Weights are read one after another, dequantized and written: memory is bounded by one file of the folder. They are the
quantized ones, as float32 or bfloat16; what quantization has rounded is lost.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from gtpo_megatron.errors import ConfigError
from gtpo_megatron.untrusted.text import printable
from gtpo_megatron.weights.architecture import Architecture
from gtpo_megatron.weights.conversion import ConversionProgress
from gtpo_megatron.weights.gguf.header import GGUFTensor, Header, read_header
from gtpo_megatron.weights.gguf.model import STRETCHED, model_architecture, model_config, special_ids
from gtpo_megatron.weights.gguf.tokenizer import read_tokenizer
from gtpo_megatron.weights.hf.reader import require_finite
from gtpo_megatron.weights.hf.writer import write_shards, written_aside
from gtpo_megatron.weights.reshard import hf_shapes

DTypeName = Literal["float32", "bfloat16"]


def gguf_to_hf(source: Path, target: Path, *, dtype: DTypeName, progress: ConversionProgress) -> str:
    """Converts a GGUF file of a dense Llama, Qwen2 or Qwen3.

    Args:
        source: the file.
        target: folder to create; it appears only if the conversion succeeds.
        dtype: dtype of the weights in ``target``.
        progress: receives the bytes of every tensor.

    Returns:
        What quantization has cost, in one line.

    Raises:
        ConfigError: the file cannot be read, its model cannot be converted, or ``target`` is not empty.
        CheckpointError: the disk is full or not writable.
        ModuleNotFoundError: the package gguf is missing.
    """
    header = read_header(source)
    arch = model_architecture(header)
    weights = _Weights(header, arch, getattr(torch, dtype))
    with written_aside(target, num_bytes=sum(weights.sizes.values())) as scratch:
        tokenizer = read_tokenizer(header, max_tokens=arch.max_positions)
        progress.start(sum(weights.sizes.values()))

        def read(names: Sequence[str]) -> dict[str, Tensor]:
            found = {}
            for name in names:
                found[name] = weights.read(name)
                progress.advance(found[name].nbytes)
            return found

        write_shards(scratch, weights.sizes, read)
        tokenizer.save_pretrained(scratch)
        _write_json(scratch / "config.json", model_config(header) | {"dtype": dtype})
        _write_json(scratch / "generation_config.json", special_ids(header))
    return weights.cost


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


class _Weights:
    """The tensors of a GGUF file under their Hugging Face names.

    Args:
        header: header of the file.
        arch: architecture of its model.
        dtype: dtype of the tensors.

    Attributes:
        sizes: bytes of every tensor in ``dtype``, in the order of the model.

    Raises:
        ConfigError: the tensors are not exactly those of the architecture, or do not lie within the file.
    """

    def __init__(self, header: Header, arch: Architecture, dtype: torch.dtype) -> None:
        self._header, self._arch, self._dtype = header, arch, dtype
        self._shapes = hf_shapes(arch)
        self._names = _gguf_names(self._shapes, arch)
        self.sizes = {name: math.prod(shape) * dtype.itemsize for name, shape in self._shapes.items()}
        place = printable(header.path)
        if more := sorted(header.tensors.keys() - self._names.values() - {STRETCHED}):
            raise ConfigError(
                f"{place}: tensor {printable(more[0])} ({len(more)} in all) is none of a {arch.family} model that can "
                f"be converted"
            )
        for name, shape in self._shapes.items():
            stored = header.tensors.get(self._names[name])
            if stored is None or stored.shape != shape:
                there = "missing" if stored is None else f"of shape {stored.shape}"
                raise ConfigError(
                    f"{place}: tensor {self._names[name]} is {there}, expected one of shape {shape}; fetch it again"
                )
            self._end(stored, self._names[name])

    def _end(self, stored: GGUFTensor, name: str) -> int:
        """Offset of the byte after a tensor, which is within the file."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        place = printable(self._header.path)
        try:
            block, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(stored.type_id)]
        except (ValueError, KeyError) as error:
            raise ConfigError(f"{place}: tensor {name} has the unknown type {stored.type_id}") from error
        if stored.shape[-1] % block:
            raise ConfigError(f"{place}: {stored.shape[-1]} columns of {name} are no whole blocks of {block}")
        end = stored.offset + math.prod(stored.shape) // block * num_bytes
        if end > self._header.num_bytes:
            raise ConfigError(
                f"{place}: ends after {self._header.num_bytes} bytes, inside tensor {name}, which goes to {end}; fetch "
                f"it again"
            )
        return end

    def read(self, name: str) -> Tensor:
        """The tensor of a Hugging Face name, dequantized.

        Raises:
            ConfigError: it holds NaN or infinity, or its type cannot be dequantized.
        """
        import numpy as np
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        path, stored = self._header.path, self._header.tensors[self._names[name]]
        end = self._end(stored, self._names[name])
        raw = np.fromfile(path, dtype=np.uint8, count=end - stored.offset, offset=stored.offset)
        kind = GGMLQuantizationType(stored.type_id)
        try:
            rows = dequantize(raw.reshape(math.prod(stored.shape[:-1]), -1), kind)
        except NotImplementedError as error:
            raise ConfigError(f"{printable(path)}: {kind.name} cannot be dequantized by the package gguf") from error
        values = torch.from_numpy(np.ascontiguousarray(rows, dtype=np.float32)).reshape(stored.shape)
        if self._arch.family == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            values = _halves_apart(values, self._arch.head_size)
        require_finite([values], name, where=path)
        return values.to(self._dtype)

    @property
    def cost(self) -> str:
        """Which quantization how many weights have, and that they stay rounded."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        counts: Counter[str] = Counter()
        bits = 0.0
        for stored in map(self._header.tensors.__getitem__, self._names.values()):
            kind, elements = GGMLQuantizationType(stored.type_id), math.prod(stored.shape)
            block, num_bytes = GGML_QUANT_SIZES[kind]
            counts[kind.name] += elements
            bits += 8 * num_bytes / block * elements
        total = counts.total()
        parts = ", ".join(f"{kind} {100 * count / total:.2g}%" for kind, count in counts.most_common())
        rounded = (
            "nothing was rounded to blocks"
            if counts.keys() <= {"F32", "F16", "BF16"}
            else "the weights are these rounded ones, not the original's"
        )
        return f"{total:,} weights of {bits / total:.2f} bits ({parts}): {rounded}"


def _gguf_names(names: Iterable[str], arch: Architecture) -> dict[str, str]:
    """The names in a GGUF file: ``blk.3.attn_q.weight`` of ``model.layers.3.self_attn.q_proj.weight``."""
    from gguf import MODEL_ARCH, get_tensor_name_map

    table = get_tensor_name_map(MODEL_ARCH[arch.family.upper()], arch.num_layers)
    return {name: f"{table.get_name(module)}.{kind}" for name in names for module, _, kind in [name.rpartition(".")]}


def _halves_apart(values: Tensor, head_size: int) -> Tensor:
    """Rows of query or key with the two elements of a rotated pair half a head apart.

    llama.cpp rotates neighbours in a Llama and reorders the rows for that; transformers rotates halves of the head.
    """
    pairs = values.view(-1, head_size // 2, 2, *values.shape[1:])
    return pairs.transpose(1, 2).reshape(values.shape)
