"""Checks of tensors before any maths. Shapes and dtypes are metadata; values are looked at once, in ``rows.py``."""

import torch
from torch import Tensor

from gtpo_megatron.config.algorithm import ALGORITHMS
from gtpo_megatron.errors import ConfigError, ShapeError

_FLOATS = (torch.float32, torch.float64)


def check_config(config: object) -> None:
    """The configuration is one of an algorithm.

    Raises:
        ConfigError: it is something else, such as an algorithm's name.
    """
    if not isinstance(config, ALGORITHMS):
        known = ", ".join(kind.__name__ for kind in ALGORITHMS)
        raise ConfigError(f"config: got {type(config).__name__} ({config!r}), expected one of {known}")


def check_tensor(**tensors: Tensor) -> None:
    """Every argument is a tensor.

    Raises:
        ShapeError: it is something else.
    """
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise ShapeError(f"{name}: expected a tensor, got {type(tensor).__name__}")


def check_shape(shape: tuple[int, ...], **tensors: Tensor) -> None:
    """Every tensor has this shape.

    Raises:
        ShapeError: it has not.
    """
    check_tensor(**tensors)
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != shape:
            raise ShapeError(f"{name}: got shape {tuple(tensor.shape)}, expected {shape}")


def check_rank(num_dims: int, **tensors: Tensor) -> None:
    """Every tensor has this many dimensions.

    Raises:
        ShapeError: it has not.
    """
    check_tensor(**tensors)
    for name, tensor in tensors.items():
        if tensor.ndim != num_dims:
            raise ShapeError(f"{name}: got {tensor.ndim} dimensions {tuple(tensor.shape)}, expected {num_dims}")


def check_mask(**tensors: Tensor) -> None:
    """Every tensor is bool.

    Raises:
        ShapeError: it is not.
    """
    for name, tensor in tensors.items():
        if tensor.dtype != torch.bool:
            raise ShapeError(f"{name}: got {tensor.dtype}, expected torch.bool")


def check_full_precision(**tensors: Tensor) -> None:
    """Every tensor is float32 or float64: 16-bit entropies are off by up to 0.4 nats, 16-bit log-probs worse.

    Raises:
        ShapeError: it is of another dtype; nothing is upcast in silence.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in _FLOATS:
            raise ShapeError(
                f"{name}: got {tensor.dtype}, expected torch.float32 or torch.float64; compute it in float32, an "
                "upcast here would come too late"
            )


def check_labels(**tensors: Tensor) -> None:
    """Every tensor holds integers.

    Raises:
        ShapeError: it does not.
    """
    for name, tensor in tensors.items():
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool:
            raise ShapeError(f"{name}: got {tensor.dtype}, expected torch.int64")
