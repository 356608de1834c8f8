"""Writes a model in Hugging Face format: the tensors from a buffer, every other file as it was in the source folder."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from gtpo_megatron.errors import CheckpointError
from gtpo_megatron.weights.hf_buffer import HFBuffer

SHARD_BYTES = 5 << 30
"""Largest size of one file, as Hugging Face writes them."""

DTYPE_KEYS = ("dtype", "torch_dtype")
"""Names of the dtype in config.json, new and old."""


def write_folder(buffer: HFBuffer, source: Path, target: Path) -> None:
    """Writes ``target`` whole or not at all; what was there is replaced only when the new folder is complete.

    Args:
        buffer: all tensors.
        source: the folder the model came from: configuration and tokenizer are taken from it.
        target: the folder to make.

    Raises:
        CheckpointError: the disk is full or not writable.
    """
    scratch = target.with_name(f".{target.name}.partial")
    try:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        _copy_companions(source, scratch, buffer.layout.dtype_name)
        _write_shards(buffer, scratch)
        old = target.with_name(f".{target.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if target.exists():
            target.rename(old)
        scratch.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(f"{target} could not be written: {error.strerror or error}") from error


def _copy_companions(source: Path, target: Path, dtype_name: str) -> None:
    for path in sorted(source.iterdir()):
        if (
            path.is_file()
            and path.suffix not in {".safetensors", ".bin", ".pt", ".pth"}
            and "index.json" not in path.name
        ):
            shutil.copyfile(path, target / path.name)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    for key in DTYPE_KEYS:
        if key in config:
            config[key] = dtype_name
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _write_shards(buffer: HFBuffer, target: Path) -> None:
    shards = list(_shards(buffer))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        many = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        name = "model.safetensors" if len(shards) == 1 else many
        save_file(shard, target / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, name)
    if len(shards) > 1:
        total = sum(tensor.nbytes for _, tensor in buffer.items())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shards(buffer: HFBuffer) -> Iterator[dict[str, Tensor]]:
    """Consecutive tensors, as many as fit a file."""
    shard: dict[str, Tensor] = {}
    filled = 0
    for name, tensor in buffer.items():
        if shard and filled + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard, filled = {}, 0
        # the tensors share one mapping, which safetensors takes for aliased storage
        shard[name] = tensor.clone()
        filled += tensor.nbytes
    if shard:
        yield shard
