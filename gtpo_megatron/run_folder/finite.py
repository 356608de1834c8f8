"""What counts as a number in a file that a crash, a NaN or another program may have written."""

from typing import Any

import numpy as np

MAX_MAGNITUDE = 1e100
"""Of a number; greater ones are damage, and their sums and squares overflow."""


def finite(value: Any) -> float | None:
    """The value as a float; None for anything that is not a finite number: text, a list, a truth value, NaN.

    Args:
        value: as JSON or YAML gives it.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < MAX_MAGNITUDE:
        return None
    return float(value)


def all_finite(values: Any) -> bool:
    """Whether this is a flat list of finite numbers; an empty one is."""
    if not isinstance(values, list):
        return False
    try:
        array = np.asarray(values)
    except ValueError:  # lists of different lengths
        return False
    return array.ndim == 1 and array.dtype.kind in "fiu" and bool((np.abs(array) < MAX_MAGNITUDE).all())
