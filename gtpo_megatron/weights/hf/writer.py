"""Writes folders in Hugging Face format: sharded safetensors with an index; all other files are copied."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from gtpo_megatron.atomic_file import write_file
from gtpo_megatron.errors import CheckpointError, ConfigError
from gtpo_megatron.untrusted.fields import Fields
from gtpo_megatron.untrusted.json_text import read_json
from gtpo_megatron.weights.hf.reader import ADAPTER_CONFIG_FILE, INDEX_FILE, SINGLE_FILE
from gtpo_megatron.weights.quantization import KEY as QUANTIZATION
from gtpo_megatron.weights.text_part import text_config

SHARD_BYTES = 5 << 30
"""Largest size of one file, as Hugging Face writes them."""

DTYPE_KEYS = ("dtype", "torch_dtype")
"""Names of the dtype in config.json, new and old."""

CHAT_TEMPLATES = "additional_chat_templates"
"""Folder in which transformers keeps a tokenizer's chat templates besides the usual one."""

WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"})
"""Suffixes of weight files in any format; these files are not copied."""


@contextmanager
def written_aside(target: Path, *, num_bytes: int, replace: bool = False) -> Iterator[Path]:
    """Yields an empty folder; renames it to ``target`` if the block succeeds, removes it otherwise.

    Args:
        target: the folder to create.
        num_bytes: that will be written; raises at once if the disk has less free space.
        replace: replace an existing folder instead of raising.

    Raises:
        ConfigError: ``target`` is a file, or a folder with something in it that may not be replaced.
        CheckpointError: the disk is full or not writable.
    """
    target = target.resolve()  # "." has no name of its own
    if target.exists() and not replace and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists and is not an empty folder; choose another, or remove it first")
    scratch, old = (target.with_name(f".{target.name}.{state}") for state in ("partial", "old"))
    try:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        _check_room(scratch, num_bytes)
        yield scratch
        for path in scratch.rglob("*"):
            _flush(path)
        shutil.rmtree(old, ignore_errors=True)
        if target.exists():
            target.rename(old)
        scratch.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{target} could not be written: {getattr(error, 'strerror', None) or error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _flush(path: Path) -> None:
    """Flushes a file or folder to the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_room(folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise CheckpointError(
            f"{folder.parent} has {free / 2**30:.2f} GiB free, but {num_bytes / 2**30:.2f} GiB are to be written; "
            f"make room, or choose another disk"
        )


def copy_companions(source: Path, target: Path, *, dtype_name: str | None) -> None:
    """Copies all files but weights (configuration, tokenizer, licence) and sets the dtype in ``config.json``.

    What is written is not quantized, so ``quantization_config`` stays behind; so do parts that are no text.

    The configuration of adapters stays behind with their weights: transformers would look for these.
    Of folders it copies the tokenizer's further chat templates alone: others may be anything, of any size.

    Args:
        source: folder of the original model.
        target: an empty folder.
        dtype_name: dtype of the tensors in ``target``; None leaves ``config.json`` as it is.
    """
    for path in sorted(source.iterdir()):
        is_of_weights = path.suffix in WEIGHT_SUFFIXES or path.name.endswith(".index.json")
        if path.is_file() and not is_of_weights and path.name != ADAPTER_CONFIG_FILE:
            shutil.copyfile(path, target / path.name)
    if (templates := source / CHAT_TEMPLATES).is_dir():
        shutil.copytree(templates, target / CHAT_TEMPLATES)
    whole = Fields(read_json(target / "config.json", error=ConfigError), str(source), ConfigError).raw
    config = text_config(whole)
    config.pop(QUANTIZATION, None)
    changed = {key: dtype_name for key in DTYPE_KEYS if key in config and dtype_name not in (None, config[key])}
    if changed or config != whole:
        write_file(target / "config.json", json.dumps(config | changed, indent=2) + "\n")


def plan_shards(sizes: Mapping[str, int], shard_bytes: int) -> list[list[str]]:
    """Groups consecutive tensors into files; a tensor larger than ``shard_bytes`` has its own file.

    Args:
        sizes: bytes of every tensor, in file order.
        shard_bytes: size of the largest file.
    """
    shards: list[list[str]] = []
    filled = 0
    for name, num_bytes in sizes.items():
        if not shards or filled + num_bytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += num_bytes
    return shards


def write_shards(
    target: Path,
    sizes: Mapping[str, int],
    read: Callable[[Sequence[str]], dict[str, Tensor]],
    *,
    shard_bytes: int | None = None,
) -> None:
    """Writes tensors to one file, or to several with an index. Memory: the tensors of one file.

    Args:
        target: folder.
        sizes: bytes of every tensor, in file order.
        read: returns the tensors of a file; the next call may overwrite them.
        shard_bytes: size of the largest file; ``SHARD_BYTES`` if not given.
    """
    shards = plan_shards(sizes, shard_bytes or SHARD_BYTES)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        many = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        name = SINGLE_FILE if len(shards) == 1 else many
        save_file(read(names), target / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, name)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (target / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
