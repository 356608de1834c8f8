"""The folder of a model that is named as GGUF, made at its first use below the user's cache folder.

There is one for every content of a file. Nothing is downloaded.
"""

import hashlib
import logging
import os
import tempfile
from dataclasses import replace
from pathlib import Path

from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.errors import CheckpointError
from gtpo_megatron.untrusted.text import printable
from gtpo_megatron.weights.gguf.source import gguf_file, is_gguf

logger = logging.getLogger(__name__)

REVISION = 1
"""Raised when the same file is converted to another folder, so that folders made before are not used any more."""


def with_model_folder(config: RunConfig) -> RunConfig:
    """The configuration with a folder as ``model.path``; of a GGUF file :func:`model_folder`, which may raise."""
    if not is_gguf(config.model.path):
        return config
    return replace(config, model=replace(config.model, path=str(model_folder(config.model.path))))


def model_folder(path: str) -> Path:
    """The converted folder of the model that ``gguf:...`` names, made if it is not there yet.

    The weights are float32, the exact values that the file stands for. Of two processes that convert at once, both do
    the work and one folder stays.

    Raises:
        ConfigError: the file is not there, or its model cannot be converted.
        CheckpointError: the cache folder cannot be written.
        ModuleNotFoundError: a conversion is due, and the package gguf is missing.
    """
    file = gguf_file(path)
    folder = cached_folder(file)
    if folder.is_dir():
        return folder
    from gtpo_megatron.weights.conversion import ConversionProgress  # these take seconds
    from gtpo_megatron.weights.gguf.conversion import gguf_to_hf

    logger.warning("%s is converted to %s, once", printable(path), folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".partial-") as scratch:
            made = Path(scratch) / folder.name
            cost = gguf_to_hf(file, made, dtype="float32", progress=ConversionProgress())
            _put(made, folder)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error.strerror or error}; set XDG_CACHE_HOME") from error
    logger.warning("%s: %s", printable(path), cost)
    return folder


def _put(made: Path, folder: Path) -> None:
    try:
        made.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another process was first, and its folder has the same content
            raise


def cached_folder(file: Path) -> Path:
    """Where the converted folder of a GGUF file is, or will be: its name has a digest of the file's content."""
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "blake2b")
    digest.update(f"revision {REVISION}".encode())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "gtpo-megatron" / "models" / f"{file.stem}-{digest.hexdigest()[:16]}"
