"""A configuration to YAML and back, strictly: an unknown key, a missing one or a value of another type is an error."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from gtpo_megatron.config.algorithm import AlgorithmConfig
from gtpo_megatron.config.algorithm.named import algorithm_class, algorithm_name
from gtpo_megatron.config.configuration import make
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.config.sft import SftConfig
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.untrusted.text import printable, shown
from gtpo_megatron.untrusted.yaml_text import read_yaml, written_yaml

KIND_KEY = "kind"
"""Names the class where a field may hold one of several."""

T = TypeVar("T")

AnyConfig = RunConfig | SftConfig
"""What a run folder's ``config.yaml`` may be of: a run, or a warm start."""


def to_plain(config: object) -> dict[str, Any]:
    """A configuration as nested dictionaries, lists, strings and numbers; every class by its name under ``kind``."""
    if not dataclasses.is_dataclass(config):
        raise ConfigError(f"expected a configuration, got {type(config).__name__}")
    kind = algorithm_name(type(config)) if isinstance(config, AlgorithmConfig) else type(config).__name__
    plain: dict[str, Any] = {KIND_KEY: kind}
    for field in dataclasses.fields(config):
        plain[field.name] = _plain_value(getattr(config, field.name))
    return plain


def to_yaml(config: AnyConfig) -> str:
    """The resolved configuration, every field written out, in the order of the classes."""
    return written_yaml(to_plain(config))


def load_config(path: Path) -> RunConfig:
    """Reads a run folder's ``config.yaml``, as ``to_yaml`` wrote it.

    Raises:
        ConfigError: not YAML, an unknown or missing key, a value of another type, values that no run can have, or the
            configuration of a warm start.
    """
    found = load_any(path)
    if isinstance(found, RunConfig):
        return found
    raise ConfigError(f"{printable(path)} is of a warm start (gtpo-megatron sft); expected the configuration of a run")


def load_any(path: Path) -> AnyConfig:
    """Reads the ``config.yaml`` of a run or of a warm start.

    Raises:
        ConfigError: as in :func:`load_config`.
    """
    plain, where = read_yaml(path, error=ConfigError), printable(path)
    if isinstance(plain, dict) and plain.get(KIND_KEY) == SftConfig.__name__:
        return _read_dataclass(SftConfig, plain, where)
    return from_plain(plain, where)


def from_plain(plain: Any, where: str) -> RunConfig:
    """Reads what :func:`to_plain` made, also in another process: files and modules that it names are loaded there.

    Raises:
        ConfigError: as in :func:`load_config`.
    """
    return _read_dataclass(RunConfig, plain, where)


def difference(left: AnyConfig, right: AnyConfig) -> list[str]:
    """The fields in which two configurations differ, as ``path: left -> right``."""
    return _difference(to_plain(left), to_plain(right), "")


def _difference(left: Any, right: Any, where: str) -> list[str]:
    if isinstance(left, dict) and isinstance(right, dict):
        rows = []
        for key in [*left, *(k for k in right if k not in left)]:
            rows += _difference(left.get(key), right.get(key), f"{where}.{key}" if where else key)
        return rows
    return [] if left == right else [f"{where}: {left!r} -> {right!r}"]


def _plain_value(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_plain(value)
    if isinstance(value, tuple | list):
        return [_plain_value(v) for v in value]
    if isinstance(value, dict):
        return {key: _plain_value(v) for key, v in value.items()}
    return value


def _read_dataclass(kind: type[T], plain: Any, where: str) -> T:
    if not isinstance(plain, dict):
        raise ConfigError(f"{where}: expected the fields of {kind.__name__}, got {shown(plain)}")
    hints = get_type_hints(kind)
    given = {str(key): value for key, value in plain.items() if key != KIND_KEY}
    values = {key: _read_value(hints.get(key), value, f"{where}: {key}") for key, value in given.items()}
    try:
        found = make(kind, values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    if missing := [field.name for field in dataclasses.fields(kind) if field.name not in given]:  # type: ignore[arg-type]
        raise ConfigError(f"{where}: {kind.__name__} lacks {', '.join(missing)}")  # also one that has a default
    return found


def _read_value(hint: Any, plain: Any, where: str) -> Any:
    """In the form that a class takes: mappings become configurations, lists tuples. The class checks the types."""
    if hint is AlgorithmConfig:
        return _read_algorithm(plain, where)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _read_dataclass(hint, plain, where)
    if plain is None or (isinstance(plain, dict) and get_origin(hint) is Mapping):
        return plain
    arms = [arm for arm in get_args(hint) if isinstance(arm, type) and dataclasses.is_dataclass(arm)]
    if classes := {arm.__name__: arm for arm in arms}:
        kind = plain.get(KIND_KEY) if isinstance(plain, dict) else None
        if not isinstance(kind, str) or kind not in classes:
            raise ConfigError(f"{where}: {KIND_KEY}={shown(kind)}: must be one of {', '.join(classes)}")
        return _read_dataclass(classes[kind], plain, where)
    return _as_tuples(plain)


def _read_algorithm(plain: Any, where: str) -> AlgorithmConfig:
    name = plain.get(KIND_KEY) if isinstance(plain, dict) else None
    try:
        kind = algorithm_class(name)
    except ConfigError as error:
        raise ConfigError(f"{where}.{KIND_KEY}: {error}") from error
    return _read_dataclass(kind, plain, where)


def _as_tuples(plain: Any) -> Any:
    return tuple(map(_as_tuples, plain)) if isinstance(plain, list) else plain
