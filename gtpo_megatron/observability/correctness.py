"""Which responses are correct, for readers of files: the comparison of ``algorithms.batch.outcome``, without torch."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

Flags = np.ndarray[Any, np.dtype[np.bool_]]


def are_correct(rewards: ArrayLike, *, threshold: float) -> Flags:
    """``r_i >= threshold`` in float32, the precision in which training has its rewards.

    Ten tenths add up to 0.9999999999999999 in float64, which is 1 in float32: a file keeps the former, and a response
    must not be wrong in a table that was correct in training.

    Args:
        rewards: any shape, a single number included; those without a verdict mean nothing here.
        threshold: least reward of a correct response.

    Returns:
        Of the same shape.
    """
    with np.errstate(over="ignore"):  # to infinity, as torch does
        return np.asarray(np.asarray(rewards).astype(np.float32) >= np.float32(threshold))
