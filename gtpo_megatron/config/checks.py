"""Checks of values that several configurations share. Each raises ConfigError: field, value, allowed values."""

import datetime
import math
from collections.abc import Sequence

from gtpo_megatron.errors import ConfigError
from gtpo_megatron.untrusted.text import shown

NUM_SEEDS = 2**32
"""numpy's global generator, which vLLM seeds too, takes 32 bits."""


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
