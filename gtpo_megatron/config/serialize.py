"""A configuration to YAML and back, strictly: an unknown key, a missing one or a value of another type is an error."""

import dataclasses
import difflib
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from gtpo_megatron.config.algorithm import AlgorithmConfig
from gtpo_megatron.config.algorithm.named import algorithm_class, algorithm_name
from gtpo_megatron.config.checks import LARGEST_INTEGER
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.untrusted.text import MAX_SHOWN, printable, shown
from gtpo_megatron.untrusted.yaml_text import parse_yaml, read_yaml, written_yaml

KIND_KEY = "kind"
"""Names the class where a field may hold one of several."""

T = TypeVar("T")


def to_plain(config: object) -> dict[str, Any]:
    """A configuration as nested dictionaries, lists, strings and numbers; every class by its name under ``kind``."""
    if not dataclasses.is_dataclass(config):
        raise ConfigError(f"expected a configuration, got {type(config).__name__}")
    kind = algorithm_name(type(config)) if isinstance(config, AlgorithmConfig) else type(config).__name__
    plain: dict[str, Any] = {KIND_KEY: kind}
    for field in dataclasses.fields(config):
        plain[field.name] = _plain_value(getattr(config, field.name))
    return plain


def to_yaml(config: RunConfig) -> str:
    """The resolved configuration, every field written out, in the order of the classes."""
    return written_yaml(to_plain(config))


def from_yaml(text: str, *, source: str = "config") -> RunConfig:
    """Reads what ``to_yaml`` wrote.

    Args:
        text: YAML.
        source: named in errors, usually the file's path.

    Raises:
        ConfigError: not YAML, an unknown or missing key, a value of another type, or values that no run can have.
    """
    return _read_dataclass(RunConfig, parse_yaml(text, source, error=ConfigError), source)


def load_config(path: Path) -> RunConfig:
    """Reads a run folder's ``config.yaml``."""
    return _read_dataclass(RunConfig, read_yaml(path, error=ConfigError), printable(path))


def difference(left: RunConfig, right: RunConfig) -> list[str]:
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
    return value


def _read_dataclass(kind: type[T], plain: Any, where: str) -> T:
    if not isinstance(plain, dict):
        raise ConfigError(f"{where}: expected the fields of {kind.__name__}, got {shown(plain)}")
    given = {key: value for key, value in plain.items() if key != KIND_KEY}
    hints = get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for key in given:
        if key not in names:
            close = difflib.get_close_matches(str(key)[:MAX_SHOWN], names, n=1)
            hint = f"; perhaps you meant {close[0]!r}" if close else f"; known: {', '.join(names)}"
            raise ConfigError(f"{where}: unknown key {shown(key)} in {kind.__name__}{hint}")
    missing = [name for name in names if name not in given]
    if missing:
        raise ConfigError(f"{where}: {kind.__name__} lacks {', '.join(missing)}")
    return kind(**{name: _read_value(hints[name], given[name], f"{where}: {name}") for name in names})


def _read_value(hint: Any, plain: Any, where: str) -> Any:
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return _read_union(get_args(hint), plain, where)
    if origin is Literal:
        if plain not in get_args(hint):
            raise ConfigError(f"{where}={shown(plain)}: must be one of {', '.join(map(repr, get_args(hint)))}")
        return plain
    if origin is tuple:
        return _read_tuple(get_args(hint), plain, where)
    if hint is AlgorithmConfig:
        return _read_algorithm(plain, where)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _read_dataclass(hint, plain, where)
    if hint is float:
        plain = _read_float(plain)
    if not isinstance(plain, hint) or (isinstance(plain, bool) and hint is not bool):
        raise ConfigError(f"{where}={shown(plain)}: expected {hint.__name__}, got {type(plain).__name__}")
    return plain


def _read_float(plain: Any) -> Any:
    """An integer as a float."""
    is_number = isinstance(plain, int) and not isinstance(plain, bool) and abs(plain) <= LARGEST_INTEGER
    return float(plain) if is_number else plain


def _read_algorithm(plain: Any, where: str) -> AlgorithmConfig:
    name = plain.get(KIND_KEY) if isinstance(plain, dict) else None
    try:
        kind = algorithm_class(name)
    except ConfigError as error:
        raise ConfigError(f"{where}.{KIND_KEY}: {error}") from error
    return _read_dataclass(kind, plain, where)


def _read_union(arms: tuple[Any, ...], plain: Any, where: str) -> Any:
    if plain is None and type(None) in arms:
        return None
    classes = {arm.__name__: arm for arm in arms if isinstance(arm, type) and dataclasses.is_dataclass(arm)}
    if classes:
        kind = plain.get(KIND_KEY) if isinstance(plain, dict) else None
        if not isinstance(kind, str) or kind not in classes:
            raise ConfigError(f"{where}: {KIND_KEY}={shown(kind)}: must be one of {', '.join(classes)}")
        return _read_dataclass(classes[kind], plain, where)
    others = [arm for arm in arms if arm is not type(None)]
    for arm in others:
        try:
            return _read_value(arm, plain, where)
        except ConfigError:
            continue
    raise ConfigError(f"{where}={shown(plain)}: expected one of {', '.join(str(arm) for arm in others)}")


def _read_tuple(items: tuple[Any, ...], plain: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(plain, list | tuple):
        raise ConfigError(f"{where}={shown(plain)}: expected a list")
    if len(items) == 2 and items[1] is Ellipsis:
        return tuple(_read_value(items[0], value, f"{where}[{i}]") for i, value in enumerate(plain))
    if len(plain) != len(items):
        raise ConfigError(f"{where}={shown(plain)}: expected {len(items)} values, got {len(plain)}")
    return tuple(
        _read_value(hint, value, f"{where}[{i}]") for i, (hint, value) in enumerate(zip(items, plain, strict=True))
    )
