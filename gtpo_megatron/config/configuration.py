"""What makes a class a configuration: it is frozen, pydantic checks its fields, and an error is one line.

The line says field, value and what is allowed, whatever made the object: a call, ``dataclasses.replace``, a file or a
command line.
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import field, fields
from functools import cache, wraps
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    TypeAlias,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import AfterValidator, ConfigDict, JsonValue, ValidationError
from pydantic.dataclasses import dataclass, is_pydantic_dataclass

from gtpo_megatron.errors import ConfigError
from gtpo_megatron.untrusted.text import MAX_SHOWN, shown

T = TypeVar("T")

LARGEST_INTEGER = 2**63 - 1
"""What every library that a number reaches can hold; it also keeps a message about a number readable."""

_TOO_LARGE = "must lie between -2^63 and 2^63"

_BOUNDS = {"greater_than", "greater_than_equal", "less_than", "less_than_equal", "finite_number"}
"""pydantic's errors for a value of the right type: its sentence says what is allowed."""


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def configuration(kind: type[T]) -> type[T]:
    """Makes a class a frozen dataclass of keyword-only fields that hold what their annotations say, defaults included.

    Numbers are finite and fit in 64 bits. An integer stands for a float and becomes one, so that equal configurations
    also print alike. Anything else, an unknown field and a missing one are a ConfigError.
    """
    strict = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, validate_default=True)
    kind.__doc__ = (kind.__doc__ or "").replace("``", "")  # which the command line's help prints
    made: Any = dataclass(kind, config=strict, frozen=True, kw_only=True, slots=True)
    validate = made.__init__

    @wraps(validate)
    def init(self: T, /, **given: object) -> None:
        for name, value in given.items():
            if isinstance(value, int | tuple) and not _fits(value):
                raise ConfigError(f"{name}={shown(value)}: {_TOO_LARGE}")
        try:
            validate(self, **given)
        except ValidationError as error:
            problem = _one_line(made, given, error)
            raise problem from problem.__cause__

    made.__init__ = init
    return made  # type: ignore[no-any-return]


def require_decorator(kind: type) -> None:
    """Raises ConfigError for a class that only inherits from a configuration: its own annotations are no fields."""
    if "__dataclass_fields__" not in vars(kind):
        raise ConfigError(
            f"{kind.__module__}:{kind.__qualname__} lacks @configuration (gtpo_megatron.config.configuration), so "
            f"what it adds are no fields"
        )


def make(kind: type[T], values: Mapping[str, object]) -> T:
    """An object of a configuration, or of a plain dataclass that derives from one; the fields of both are checked.

    Raises:
        ConfigError: an unknown or missing field, or a value that a field cannot have.
    """
    if is_pydantic_dataclass(kind):
        return kind(**values)  # type: ignore[return-value]
    exact = _checked(kind)(**values)  # type: ignore[arg-type]  # a class is hashable
    return kind(**{one.name: getattr(exact, one.name) for one in fields(kind)})  # type: ignore[arg-type]


def unchecked(config: T, **changes: object) -> T:
    """A copy with other values of some fields, which nothing checks: defaults of options that are still to be read.

    ``make`` checks what becomes of them.
    """
    copy = object.__new__(type(config))
    for one in fields(config):  # type: ignore[arg-type]
        object.__setattr__(copy, one.name, changes.get(one.name, getattr(config, one.name)))
    return copy


def check_fields(config: object) -> None:
    """Checks an object of a plain dataclass that derives from a configuration, as ``@configuration`` would have.

    Raises:
        ConfigError: as in ``make``, or the class has no decorator at all.
    """
    kind = type(config)
    require_decorator(kind)
    if not is_pydantic_dataclass(kind):
        exact = make(kind, {one.name: getattr(config, one.name) for one in fields(config)})  # type: ignore[arg-type]
        for one in fields(config):  # type: ignore[arg-type]
            object.__setattr__(config, one.name, getattr(exact, one.name))  # an integer that stands for a float


@cache
def _checked(kind: type) -> Any:
    return configuration(type(kind.__name__, (kind,), {"__module__": kind.__module__, "__doc__": kind.__doc__}))


def _fits(value: object) -> bool:
    """Whether every integer in a value fits in 64 bits."""
    if isinstance(value, dict | list | tuple):
        return all(map(_fits, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, int) or abs(value) <= LARGEST_INTEGER


def _fitting(values: Mapping[str, JsonValue]) -> Mapping[str, JsonValue]:
    if not _fits(values):
        raise ValueError(_TOO_LARGE)
    return values


JsonObject: TypeAlias = Annotated[Mapping[str, JsonValue], AfterValidator(_fitting)]
"""A mapping of values that JSON has. It is a copy, and equal to what is read back from a file."""


def _one_line(kind: type, given: Mapping[str, object], error: ValidationError) -> ConfigError:
    """The first problem, or the class's own error from its ``__post_init__``."""
    # an unknown field first: it is what another version or a misspelt name looks like
    problems = sorted(
        error.errors(include_url=False, include_input=False),
        key=lambda one: one["type"] != "unexpected_keyword_argument",
    )
    path, what = problems[0]["loc"], problems[0]["type"]
    cause = problems[0].get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return cause
    names = [one.name for one in fields(kind)]
    name = str(path[0])
    if name not in names:
        close = difflib.get_close_matches(name[:MAX_SHOWN], names, n=1)
        hint = f"perhaps you meant {close[0]!r}" if close else f"known: {', '.join(names)}"
        return ConfigError(f"unknown key {shown(name)} in {kind.__name__}; {hint}")
    if name not in given:
        lacking = [str(one["loc"][0]) for one in problems if one["type"] == "missing" and len(one["loc"]) == 1]
        return ConfigError(f"{kind.__name__} lacks {', '.join(lacking)}")
    annotation, value = get_type_hints(kind)[name], given[name]
    if what in _BOUNDS:
        allowed = problems[0]["msg"].replace("Input should be", "must be")
    elif cause is not None:
        allowed = str(cause)
    elif get_origin(annotation) is Literal:
        allowed = f"must be one of {', '.join(map(repr, get_args(annotation)))}"
    elif len(path) > 1 and isinstance(value, tuple | Mapping):
        inside = ".".join(map(str, path[1:]))
        allowed = f"expected {_spelled(annotation)}; at {inside[:MAX_SHOWN]}: {problems[0]['msg']}"
    else:
        allowed = f"got {type(value).__name__}, expected {_spelled(annotation)}"
    return ConfigError(f"{name}={shown(value)}: {allowed}")


def _spelled(annotation: Any) -> str:
    """An annotation as it stands in the source: ``float | None``."""
    if isinstance(annotation, type) and not get_args(annotation):
        return annotation.__name__
    if get_origin(annotation) in (Union, UnionType):
        return " | ".join("None" if one is NoneType else _spelled(one) for one in get_args(annotation))
    return re.sub(r"[\w.]+\.(\w+)", r"\1", str(annotation))
