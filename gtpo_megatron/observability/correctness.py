"""Compares rewards from files with the success threshold, like ``algorithms.token_batch`` but without torch."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

Flags = np.ndarray[Any, np.dtype[np.bool_]]


def are_correct(rewards: ArrayLike, *, threshold: float) -> Flags:
    """``r_i >= threshold`` in float32, the dtype of rewards in training, so that tables agree with training.

    Args:
        rewards: any shape, including a single number.
        threshold: lowest reward of a correct response.

    Returns:
        Flags of the same shape.
    """
    with np.errstate(over="ignore"):  # overflow gives infinity, as in torch
        return np.asarray(np.asarray(rewards).astype(np.float32) >= np.float32(threshold))
