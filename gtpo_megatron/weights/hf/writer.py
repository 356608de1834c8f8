"""Writes folders in Hugging Face format: sharded safetensors with an index, every other file as it was."""

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
from gtpo_megatron.weights.hf.reader import INDEX_FILE, SINGLE_FILE

SHARD_BYTES = 5 << 30
"""Largest size of one file, as Hugging Face writes them."""

DTYPE_KEYS = ("dtype", "torch_dtype")
"""Names of the dtype in config.json, new and old."""

WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"})
"""Files that are weights, in whichever format, and so not companions of weights."""


@contextmanager
def written_aside(target: Path, *, num_bytes: int, replace: bool = False) -> Iterator[Path]:
    """An empty folder that gets its name ``target`` if the block ends well, and is removed if not.

    Args:
        target: the folder to make.
        num_bytes: that will be written; refused at once if the disk has less.
        replace: take the place of what is there, instead of refusing to.

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
    """Waits until a file or folder is on the disk, so that a name never stands for less."""
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
    """Copies what lies beside the weights: configuration, tokenizer, licence; ``config.json`` names the new dtype.

    Args:
        source: the folder the model came from.
        target: an empty folder.
        dtype_name: of the tensors in ``target``; None leaves ``config.json`` as it is.
    """
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix not in WEIGHT_SUFFIXES and not path.name.endswith(".index.json"):
            shutil.copyfile(path, target / path.name)
    config = Fields(read_json(target / "config.json", error=ConfigError), str(source), ConfigError).raw
    changed = {key: dtype_name for key in DTYPE_KEYS if key in config and dtype_name not in (None, config[key])}
    if changed:
        write_file(target / "config.json", json.dumps(config | changed, indent=2) + "\n")


def plan_shards(sizes: Mapping[str, int], shard_bytes: int) -> list[list[str]]:
    """Consecutive tensors, as many as fit a file; one that fits none has a file of its own.

    Args:
        sizes: bytes of every tensor, in file order.
        shard_bytes: of the largest file.
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
    """Writes tensors to one file, or to several with an index; one file's tensors are in memory at a time.

    Args:
        target: folder.
        sizes: bytes of every tensor, in file order.
        read: makes the tensors of a file; they may share memory with those of the next.
        shard_bytes: of the largest file; ``SHARD_BYTES`` if not given.
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
