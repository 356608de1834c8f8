"""Finite numbers in files that may be damaged."""

from typing import Any

import numpy as np

MAX_MAGNITUDE = 1e100
"""Larger numbers count as damage, since their squares overflow."""


def finite(value: Any) -> float | None:
    """The value as a float; None if it is not a finite number (text, a list, a bool, NaN).

    Args:
        value: as JSON or YAML gives it.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < MAX_MAGNITUDE:
        return None
    return float(value)


def all_finite(values: Any) -> bool:
    """Whether this is a flat list of finite numbers, or empty."""
    if not isinstance(values, list):
        return False
    try:
        array = np.asarray(values)
    except ValueError:  # lists of different lengths
        return False
    return array.ndim == 1 and array.dtype.kind in "fiu" and bool((np.abs(array) < MAX_MAGNITUDE).all())
