"""A task of reasoning-gym, made from its name and its options as text. Imports the package when it is called."""

import dataclasses
import difflib
import importlib.metadata
import typing
from collections.abc import Mapping
from typing import Any

import pydantic

from gtpo_megatron.config.generated import REASONING_GYM
from gtpo_megatron.errors import ConfigError

_COMPOSITE = "composite"
"""A mixture of the package's own, in whose place several names are written."""

_LONGEST_DEFAULT = 20
"""Characters of an option's default, to be shown."""


def gym_version() -> str:
    """The version of reasoning-gym.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.metadata.version(REASONING_GYM)
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(
            f"{REASONING_GYM}:NAME needs the package {REASONING_GYM}: pip install 'gtpo-megatron[tasks]'"
        ) from error


def reasoning_task(name: str, options: Mapping[str, str], *, size: int = 1, seed: int = 0) -> Any:
    """The task's ``ProceduralDataset``, which generates entries and scores answers.

    Args:
        name: name of the task.
        options: options of its configuration, as text; lists as JSON.
        size: number of entries.
        seed: seed of the first one.

    Raises:
        ConfigError: the package is missing, there is no such task or option, or it refuses a value.
    """
    typed = typed_options(name, options)
    import reasoning_gym

    try:
        return reasoning_gym.create_dataset(name, size=size, seed=seed, **typed)
    except Exception as error:  # its own checks are assertions and ValueErrors
        said = ", ".join(f"{option}={value!r}" for option, value in typed.items()) or "no options"
        raise ConfigError(f"{name} with {said} is refused: {str(error) or type(error).__name__}") from error


def typed_options(name: str, options: Mapping[str, str]) -> dict[str, Any]:
    """The options of a task as its configuration has them.

    Raises:
        ConfigError: as :func:`reasoning_task`.
    """
    config = _config_of(name)
    hints = typing.get_type_hints(config)
    fields = {field.name: field for field in dataclasses.fields(config) if field.name not in ("size", "seed")}
    listed = f"its options are {', '.join(_shown(field, hints[one]) for one, field in fields.items())}"
    typed = {}
    for option, text in options.items():
        if option not in fields:
            close = difflib.get_close_matches(option, fields, n=1)
            meant = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(f"{name} has no option {option!r}{meant}; {listed}, size, seed, weight")
        adapter: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(hints[option])
        try:
            is_json = text[:1] in ("[", "{")
            typed[option] = adapter.validate_json(text) if is_json else adapter.validate_strings(text)
        except pydantic.ValidationError as error:
            raise ConfigError(f"{name}: {option}={text!r}: {error.errors()[0]['msg']}; {listed}") from error
    return typed


def _config_of(name: str) -> type:
    """The class of a task's configuration."""
    gym_version()
    from reasoning_gym.factory import DATASETS

    names = sorted(set(DATASETS) - {_COMPOSITE})
    if name not in names:
        close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
        raise ConfigError(f"{REASONING_GYM} has no task {name!r}; closest: {', '.join(close) or ', '.join(names)}")
    config: type = DATASETS[name][1]
    return config


def _shown(field: "dataclasses.Field[Any]", hint: Any) -> str:
    kind = hint.__name__ if isinstance(hint, type) else str(hint).removeprefix("typing.")
    is_short = field.default is not dataclasses.MISSING and len(str(field.default)) <= _LONGEST_DEFAULT
    return f"{field.name} ({kind}{f', {field.default}' if is_short else ''})"
