"""The folder of a model that is named as GGUF, made at its first use below the user's cache folder.

There is one for every content of a file. Nothing is downloaded.
"""

import hashlib
import logging
from pathlib import Path

from gtpo_megatron.run_folder.conversion_lock import alone
from gtpo_megatron.untrusted.text import printable
from gtpo_megatron.weights.conversion import ConversionProgress
from gtpo_megatron.weights.gguf.conversion import gguf_to_hf
from gtpo_megatron.weights.gguf.source import gguf_file

logger = logging.getLogger(__name__)

CACHE = Path(".cache/gtpo-megatron/models")
"""Below the user's home."""

REVISION = 2
"""Raised when the same file is converted to another folder, so that folders made before are not used any more."""


def converted_folder(path: str) -> Path:
    """The converted folder of the model that ``gguf:...`` names, made if it is not there yet.

    The weights are float32, the exact values that the file stands for. If another process is converting the file, this
    one waits and uses its result.

    Raises:
        ConfigError: the file is not there, its model cannot be converted, or the cache folder cannot be written.
        CheckpointError: the disk is full.
        ModuleNotFoundError: a conversion is due, and the package gguf is missing.
    """
    file = gguf_file(path)
    folder = cached_folder(file)
    if not folder.is_dir():
        with alone(folder, otherwise="gtpo-megatron convert gguf-to-hf"):
            if not folder.is_dir():  # another process may have made it while this one waited
                logger.warning("%s is converted to %s, once", printable(path), folder)
                cost = gguf_to_hf(file, folder, dtype="float32", progress=ConversionProgress())
                logger.warning("%s: %s", printable(path), cost)
    return folder


def cached_folder(file: Path) -> Path:
    """Where the converted folder of a GGUF file is, or will be: its name has a digest of the file's content."""
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "blake2b")
    digest.update(f"revision {REVISION}".encode())
    return Path.home() / CACHE / f"{file.stem}-{digest.hexdigest()[:16]}"
