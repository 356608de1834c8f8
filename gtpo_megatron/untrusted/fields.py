"""Typed values from parsed JSON or YAML."""

import dataclasses
import math
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from gtpo_megatron.errors import DataError, GTPOError
from gtpo_megatron.untrusted.text import shown

T = TypeVar("T")

_NAMES = {
    dict: "an object",
    list: "a list",
    tuple: "a list",
    str: "text",
    int: "an integer",
    float: "a finite number",
    bool: "a boolean",
}


class Fields:
    """The keys of an object, read with a type.

    Args:
        value: a parsed value of JSON or YAML.
        place: named in errors.
        error: class of errors raised.

    Raises:
        GTPOError: ``error``: the value is not an object.
    """

    def __init__(self, value: object, place: str, error: type[GTPOError] = DataError) -> None:
        if not isinstance(value, dict):
            raise error(f"{place}: is {shown(value)}, expected an object")
        self.raw: dict[str, Any] = value
        self._place, self._error = place, error

    def has(self, key: str) -> bool:
        """Whether the key is present and not null."""
        return self.raw.get(key) is not None

    def get(
        self,
        key: str,
        kind: type[T],
        default: T | None = None,
        *,
        at_least: float | None = None,
        at_most: float | None = None,
    ) -> T:
        """The value of a key.

        Args:
            key: the key.
            kind: ``int``, ``float`` (finite), ``str``, ``bool``, ``dict[str, str]``, ``list[int]``, a dataclass, ...
            default: result if the key is absent or null; None: raise.
            at_least: lower bound of a number.
            at_most: upper bound of a number.

        Raises:
            GTPOError: the class's ``error``: it is absent, of another type or out of bounds.
        """
        value = self.raw.get(key)
        if value is None:
            if default is None:
                raise self._error(f"{self._place}: lacks {key}")
            return default
        found: Any = as_kind(value, kind, f"{self._place}: {key}", self._error)
        if (at_least is not None and found < at_least) or (at_most is not None and found > at_most):
            bounds = f"from {at_least} to {at_most}" if at_most is not None else f"{at_least} or more"
            raise self._error(f"{self._place}: {key} is {shown(found)}, expected {bounds}")
        return found  # type: ignore[no-any-return]

    def fields(self, key: str) -> "Fields":
        """The object under a key; an empty one if it is absent or null."""
        value = self.raw.get(key)
        return Fields({} if value is None else value, f"{self._place}: {key}", self._error)


def as_record(kind: type[T], value: object, place: str, error: type[GTPOError] = DataError) -> T:
    """Converts an object to a dataclass; unknown keys are ignored.

    Raises:
        GTPOError: ``error``: a field without a default is absent, or one has another type.
    """
    given, hints = Fields(value, place, error).raw, get_type_hints(kind)
    found = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        if field.name in given:
            found[field.name] = as_kind(given[field.name], hints[field.name], f"{place}: {field.name}", error)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise error(f"{place}: lacks {field.name}")
    return kind(**found)


def as_kind(value: object, kind: Any, where: str, error: type[GTPOError] = DataError) -> Any:
    """Converts a value to a type; integers are valid floats, and floats without a fraction are valid integers.

    Args:
        value: a parsed value of JSON or YAML.
        kind: a type, such as ``int``, ``dict[str, float]``, ``str | None``, ``Literal["a"]`` or a dataclass.
        where: named in errors: place and key.
        error: class of errors raised.

    Raises:
        GTPOError: ``error``: the value has another type.
    """
    origin, arms = get_origin(kind) or kind, get_args(kind)
    if origin is Any or origin is object:
        return value
    if origin in (Union, UnionType):
        return _as_one_of(value, arms, where, error)
    if origin is Literal:
        if not any(value == arm and type(value) is type(arm) for arm in arms):
            raise error(f"{where} is {shown(value)}, expected one of {', '.join(map(repr, arms))}")
        return value
    if dataclasses.is_dataclass(origin) and isinstance(origin, type):
        return as_record(origin, value, where, error)
    if origin in (dict, Mapping) and isinstance(value, dict):
        return {key: as_kind(one, arms[1], f"{where}: {key}", error) for key, one in value.items()} if arms else value
    if origin in (list, tuple) and isinstance(value, list):
        kinds = arms if origin is tuple and arms and arms[-1] is not Ellipsis else (arms or (Any,))[:1] * len(value)
        if len(kinds) != len(value):
            raise error(f"{where} is {shown(value)}, expected {len(kinds)} values")
        items = [as_kind(*pair, f"{where}[{i}]", error) for i, pair in enumerate(zip(value, kinds, strict=True))]
        return tuple(items) if origin is tuple else items
    plain = _as_plain(value, origin)
    if plain is None:
        raise error(f"{where} is {shown(value)}, expected {_NAMES.get(origin, str(origin))}")
    return plain


def _as_plain(value: object, kind: Any) -> object:
    """Text, a number or a boolean; None for another type."""
    if isinstance(value, bool) or kind is bool:
        return value if isinstance(value, bool) and kind is bool else None
    if kind is float and isinstance(value, int | float):
        number = float(value)  # readers take no integers that overflow
        return number if math.isfinite(number) else None
    if kind is int and isinstance(value, float):
        return int(value) if value.is_integer() else None  # False for infinity
    return value if kind in (int, str) and isinstance(value, kind) else None


def _as_one_of(value: object, arms: tuple[Any, ...], where: str, error: type[GTPOError]) -> Any:
    if value is None and NoneType in arms:
        return None
    others = [arm for arm in arms if arm is not NoneType]
    if len(others) == 1:
        return as_kind(value, others[0], where, error)
    for arm in others:
        if isinstance(value, get_origin(arm) or arm) and not isinstance(value, bool):
            return as_kind(value, arm, where, error)
    raise error(f"{where} is {shown(value)}, expected {' or '.join(_NAMES.get(arm, str(arm)) for arm in others)}")
