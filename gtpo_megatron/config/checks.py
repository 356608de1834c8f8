"""Checks that every configuration shares. Each raises ConfigError: field, value, allowed values."""

import dataclasses
import datetime
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from gtpo_megatron.errors import ConfigError
from gtpo_megatron.untrusted.text import printable, shown

LARGEST_INTEGER = 2**63 - 1
"""What every library that a number reaches can hold; it also keeps a message about a number readable."""

NUM_SEEDS = 2**32
"""numpy's global generator, which vLLM seeds too, takes 32 bits."""


def require_types(config: Any) -> None:
    """Every field of a configuration holds what its annotation says; the first line of every ``__post_init__``.

    Numbers are finite and fit in 64 bits, whatever the field. An integer stands for a float and becomes one, so that
    equal configurations also print alike.

    Raises:
        ConfigError: a field does not; the message says field, value, got and expected.
    """
    for name, hint in _fields(type(config)).items():
        value = getattr(config, name)
        if not _fits(value, hint):
            if get_origin(hint) is Literal:
                require_choice(name, value, get_args(hint))
            raise ConfigError(f"{name}={shown(value)}: got {type(value).__name__}, expected {_spelled(hint)}")
        _require_usable_numbers(name, value)
        exact = _json_object(name, value) if get_origin(hint) is Mapping else _with_floats(value, hint)
        if exact is not value:
            object.__setattr__(config, name, exact)  # frozen for everybody else


def _require_usable_numbers(name: str, value: object) -> None:
    """Refuses NaN, infinities and integers beyond 64 bits, in tuples too."""
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, float) and not math.isfinite(number):
            raise ConfigError(f"{name}={value!r}: must be finite")
        if isinstance(number, int) and abs(number) > LARGEST_INTEGER:
            raise ConfigError(f"{name}={shown(value)}: must lie between -2^63 and 2^63")


def _json_object(name: str, value: Mapping[str, object]) -> dict[str, object]:
    """A copy of a mapping, of the kinds that JSON and YAML give back, so that it is equal to what is read again."""
    try:
        text = json.dumps(value if isinstance(value, dict) else dict(value), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{name}={shown(value)}: {printable(error)}; expected values that JSON has") from error
    found: dict[str, object] = json.loads(text)
    for one in _leaves(found):
        _require_usable_numbers(name, one)
    return found


def _leaves(value: object) -> Iterator[object]:
    if isinstance(value, dict | list):
        for child in value.values() if isinstance(value, dict) else value:
            yield from _leaves(child)
    else:
        yield value


def _fields(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _fits(value: object, hint: Any) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, arm) for arm in arguments)
    if origin is Literal:
        return any(value == one and type(value) is type(one) for one in arguments)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        kinds = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        return len(value) == len(kinds) and all(map(_fits, value, kinds))
    if origin is Mapping:
        return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
    if isinstance(value, bool) and hint is not bool:
        return False
    return isinstance(value, int | float if hint is float else hint)


def _with_floats(value: object, hint: Any) -> object:
    arguments = get_args(hint)
    if isinstance(value, int) and not isinstance(value, bool):
        if hint is float or (float in arguments and int not in arguments):
            return float(value)
    elif isinstance(value, tuple):
        hints = next((arm for arm in (hint, *arguments) if get_origin(arm) is tuple), hint)
        if any(isinstance(one, int) for one in value) and float in get_args(hints):
            return tuple(float(one) for one in value)
    return value


def _spelled(hint: Any) -> str:
    """An annotation in the words of a person."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(_spelled(arm) for arm in arguments)
    if origin is Literal:
        return f"one of {', '.join(map(repr, arguments))}"
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return f"a tuple of {_spelled(arguments[0])}"
        return f"({', '.join(map(_spelled, arguments))})"
    if origin is Mapping:
        return "a mapping of names to values"
    return "None" if hint is NoneType else str(hint.__name__)


def require_positive(**values: float) -> None:
    """Every value is finite and greater than zero."""
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{name}={value!r}: must be greater than 0")


def require_non_negative(**values: float) -> None:
    """Every value is finite and at least zero."""
    for name, value in values.items():
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"{name}={value!r}: must be 0 or more")


def require_seed(**values: int) -> None:
    """Every value is what all random generators of a run take as a seed."""
    for name, value in values.items():
        if not 0 <= value < NUM_SEEDS:
            raise ConfigError(f"{name}={value!r}: must lie between 0 and {NUM_SEEDS - 1}, which is what vLLM takes")


def require_fraction(**values: float) -> None:
    """Every value lies in [0, 1]."""
    for name, value in values.items():
        if not 0 <= value <= 1:
            raise ConfigError(f"{name}={value!r}: must lie between 0 and 1")


def require_choice(name: str, value: object, allowed: Sequence[object]) -> None:
    """The value is one of ``allowed``."""
    if value not in allowed:
        raise ConfigError(f"{name}={shown(value)}: must be one of {', '.join(repr(a) for a in allowed)}")


def require_text(**values: str) -> None:
    """No value is empty."""
    for name, value in values.items():
        if not value.strip():
            raise ConfigError(f"{name} is empty: a value is needed")


def require_date(**values: str) -> None:
    """Every value is a day, ``2026-01-31``, or empty."""
    for name, value in values.items():
        try:
            is_day = not value or datetime.date.fromisoformat(value).isoformat() == value
        except ValueError:
            is_day = False
        if not is_day:
            raise ConfigError(f"{name}={shown(value)}: must be a day as in 2026-01-31, or empty")


def divisors(number: int) -> list[int]:
    """The divisors of a positive integer, ascending; what an error message offers instead of a bad degree."""
    return [d for d in range(1, number + 1) if number % d == 0]
