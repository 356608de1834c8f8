"""Checks of tensors. Checks of values synchronise with the GPU; checks of shapes and dtypes do not."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gtpo_megatron.branches import Branch, check_within
from gtpo_megatron.errors import DataError, ShapeError

LARGEST_REWARD = 1e30

LOWEST_ENTROPY = -1e-4
"""Nats. Rounding may leave an entropy slightly below 0 (it counts as 0); a lower one is refused."""

_FLOATS = (torch.float32, torch.float64)


def check_tensor(**tensors: Tensor) -> None:
    """Checks that every argument is a tensor.

    Raises:
        ShapeError: one is not.
    """
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise ShapeError(f"{name}: expected a tensor, got {type(tensor).__name__}")


def check_shape(shape: tuple[int, ...], **tensors: Tensor) -> None:
    """Checks that every tensor has this shape.

    Raises:
        ShapeError: one does not.
    """
    check_tensor(**tensors)
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != shape:
            raise ShapeError(f"{name}: got shape {tuple(tensor.shape)}, expected {shape}")


def check_num_dims(num_dims: int, **tensors: Tensor) -> None:
    """Checks that every tensor has this many dimensions.

    Raises:
        ShapeError: one does not.
    """
    check_tensor(**tensors)
    for name, tensor in tensors.items():
        if tensor.ndim != num_dims:
            raise ShapeError(f"{name}: got {tensor.ndim} dimensions {tuple(tensor.shape)}, expected {num_dims}")


def check_mask(**tensors: Tensor) -> None:
    """Checks that every tensor is bool.

    Raises:
        ShapeError: one is not.
    """
    for name, tensor in tensors.items():
        if tensor.dtype != torch.bool:
            raise ShapeError(f"{name}: got {tensor.dtype}, expected torch.bool")


def check_full_precision(**tensors: Tensor) -> None:
    """Checks that every tensor is float32 or float64: 16-bit entropies are wrong by up to 0.4 nats, log-probs by more.

    Raises:
        ShapeError: one has another dtype.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in _FLOATS:
            raise ShapeError(
                f"{name}: got {tensor.dtype}, expected torch.float32 or torch.float64; compute it in float32, an "
                "upcast here would come too late"
            )


def check_labels(**tensors: Tensor) -> None:
    """Checks that every tensor holds integers.

    Raises:
        ShapeError: one does not.
    """
    for name, tensor in tensors.items():
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool:
            raise ShapeError(f"{name}: got {tensor.dtype}, expected torch.int64")


def check_rewards(rewards: Tensor) -> None:
    """Checks that every reward ``[B]`` is real, finite and at most ``LARGEST_REWARD`` in magnitude.

    Raises:
        ShapeError: the dtype is complex.
        DataError: a reward is NaN, infinite or beyond ``LARGEST_REWARD``.
    """
    if rewards.dtype.is_complex:
        raise ShapeError(f"rewards: got {rewards.dtype}, expected a real dtype")
    for row, value in enumerate(rewards.to(torch.float64).tolist()):
        if not -float("inf") < value < float("inf"):
            raise DataError(f"rewards[{row}] = {value}: must be finite; mark the response as failed instead")
        if abs(value) > LARGEST_REWARD:
            raise DataError(f"rewards[{row}] = {value}: must be at most {LARGEST_REWARD:g} in magnitude; scale rewards")


def check_finite(mask: Tensor, **tensors: Tensor) -> None:
    """Checks that values are finite wherever ``mask`` is True.

    Args:
        mask: ``[B, T]`` bool.
        tensors: ``[B, T]`` float by name.

    Raises:
        DataError: one is not; the message has field, row, column and value.
    """
    for name, tensor in tensors.items():
        values = tensor.detach()
        bad = mask & ~torch.isfinite(values)
        if bool(bad.any()):
            row, column = torch.nonzero(bad)[0].tolist()
            raise DataError(f"{name}[{row}, {column}] = {float(values[row, column])}: expected a finite value")


def flatten_entropies(mask: Tensor, token_entropy: Tensor) -> Tensor:
    """The entropies where ``mask`` ``[B, T]`` is True, ``[N]`` float64, at least 0.

    Raises:
        DataError: one is not finite or is below ``LOWEST_ENTROPY``; the message has the value, row and column.
    """
    return _flatten_checked(mask, "token_entropy", token_entropy, sign=1.0)


def flatten_logprobs(mask: Tensor, **logprobs: Tensor) -> Tensor:
    """The log-probs where ``mask`` ``[B, T]`` is True, ``[N]`` float64, at most 0.

    Args:
        mask: ``[B, T]`` bool.
        logprobs: one matrix ``[B, T]``, by its name in messages.

    Raises:
        DataError: one is not finite or is above ``-LOWEST_ENTROPY``; the message has the value, row and column.
    """
    ((name, matrix),) = logprobs.items()
    return -_flatten_checked(mask, name, matrix, sign=-1.0)


def flatten(mask: Tensor, matrix: Tensor) -> Tensor:
    """``[B, T]`` -> ``[N]``, detached: the values where ``mask`` is True."""
    return matrix.detach().masked_select(mask)


def first_place(mask: Tensor, flags: Tensor) -> tuple[int, int]:
    """Row and column of the first token in ``mask`` ``[B, T]`` whose flag ``[N]`` bool is True."""
    row, column = torch.nonzero(mask)[int(torch.nonzero(flags)[0])].tolist()
    return row, column


def _flatten_checked(mask: Tensor, name: str, matrix: Tensor, *, sign: float) -> Tensor:
    """``sign * matrix`` where ``mask`` is True, clamped at 0."""
    values = flatten(mask, matrix).to(torch.float64).mul_(sign)
    if len(values):
        low, high = torch.aminmax(values)  # NaN comes through
        if not (bool(low >= LOWEST_ENTROPY) and bool(torch.isfinite(high))):
            row, column = first_place(mask, ~((values >= LOWEST_ENTROPY) & torch.isfinite(values)))
            limit = f">= {LOWEST_ENTROPY}" if sign > 0 else f"<= {-LOWEST_ENTROPY}"
            raise DataError(f"{name}[{row}, {column}] = {float(matrix[row, column])}: expected a finite value {limit}")
    return values.clamp_(min=0.0)


def check_branches(branches: Sequence[Sequence[Branch]] | None, shape: tuple[int, ...]) -> None:
    """Raises ShapeError unless each of ``shape[0]`` responses has branches, and they lie within ``shape[1]`` tokens."""
    if branches is not None and len(branches) != shape[0]:
        raise ShapeError(f"branches: of {len(branches)} responses, expected {shape[0]}")
    for one in branches or ():
        check_within(one, shape[1])
