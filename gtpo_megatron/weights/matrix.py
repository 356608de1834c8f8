"""Every tensor of a model seen as a matrix, as the slicing plans see it."""

from torch import Tensor


def as_matrix(tensor: Tensor) -> Tensor:
    """``[rows, columns]``; a vector is one column."""
    return tensor if tensor.ndim == 2 else tensor.reshape(-1, 1)
