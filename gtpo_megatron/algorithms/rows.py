"""One pass over this rank's tensors: are the values usable, and which few numbers of each row do others need."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gtpo_megatron.algorithms.checks import (
    check_full_precision,
    check_labels,
    check_mask,
    check_rank,
    check_shape,
    check_tensor,
)
from gtpo_megatron.errors import DataError, ShapeError

LOWEST_ENTROPY = -1e-4
"""Nats. Rounding may leave an entropy slightly below 0 (it becomes 0); anything lower is a bug upstream."""

_BLOCK_ELEMENTS = {"cpu": 1 << 16, "cuda": 1 << 25}
"""Elements of a block: on the CPU its float64 temporaries stay in the L2 cache, on a GPU a block fills the device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowFacts:
    """A few numbers of each row of a ``[B, T]`` tensor of weights; a row without tokens has zeros.

    Attributes:
        lengths: ``[B]`` int64.
        lowest: ``[B]`` float64, smallest value on a response token, at least 0.
        highest: ``[B]`` float64, largest one.
        total: ``[B]`` float64, sum over response tokens; for diagnostics (its last bits depend on padding).
        padding_is_finite: everything outside the mask can be multiplied by 0.
    """

    lengths: Tensor
    lowest: Tensor
    highest: Tensor
    total: Tensor
    padding_is_finite: bool


def block_elements(tensor: Tensor) -> int:
    """Elements that one block of rows should hold on this tensor's device."""
    return _BLOCK_ELEMENTS.get(tensor.device.type, _BLOCK_ELEMENTS["cuda"])


def row_blocks(tensor: Tensor) -> Iterator[tuple[int, int]]:
    """First and last-plus-one row of consecutive blocks of a ``[B, T]`` tensor."""
    if not tensor.shape[1]:
        return
    rows = max(1, block_elements(tensor) // tensor.shape[1])
    for first in range(0, tensor.shape[0], rows):
        yield first, min(first + rows, tensor.shape[0])


def check_inputs(rewards: Tensor, token_entropy: Tensor, response_mask: Tensor, group_ids: Tensor) -> None:
    """Shapes, dtypes and rewards.

    Args:
        rewards: ``[B]`` any real dtype; finite.
        token_entropy: ``[B, T]`` float32 or float64, nats.
        response_mask: ``[B, T]`` bool.
        group_ids: ``[B]`` integers.

    Raises:
        ShapeError: a shape or dtype does not fit.
        DataError: a reward is NaN or infinite.
    """
    check_tensor(rewards=rewards, token_entropy=token_entropy, response_mask=response_mask, group_ids=group_ids)
    check_rank(2, token_entropy=token_entropy)
    check_shape(tuple(token_entropy.shape), response_mask=response_mask)
    check_shape((token_entropy.shape[0],), rewards=rewards, group_ids=group_ids)
    check_mask(response_mask=response_mask)
    check_full_precision(token_entropy=token_entropy)
    check_labels(group_ids=group_ids)
    if rewards.dtype.is_complex:
        raise ShapeError(f"rewards: got {rewards.dtype}, expected a real dtype")
    for row, value in enumerate(rewards.to(torch.float64).tolist()):
        if not -float("inf") < value < float("inf"):
            raise DataError(f"rewards[{row}] = {value}: must be finite; mark the response as failed instead")


def row_facts(name: str, values: Tensor, response_mask: Tensor) -> RowFacts:
    """Validates ``values`` and summarises each row.

    Args:
        name: of ``values``, for messages.
        values: ``[B, T]`` float32 or float64; anything outside the mask.
        response_mask: ``[B, T]`` bool.

    Raises:
        DataError: a mask that is not left-aligned, or a value that is NaN, infinite or below ``LOWEST_ENTROPY``.
    """
    batch, width = values.shape
    facts = torch.zeros(4, batch, dtype=torch.float64, device=values.device)
    padding_is_finite = torch.ones((), dtype=torch.bool, device=values.device)
    positions = torch.arange(1, width + 1, dtype=torch.float32, device=values.device)
    for first, last in row_blocks(values):
        live = response_mask[first:last].to(values.dtype)
        length = live.sum(1)
        end = (live * positions).amax(1)
        block = values[first:last]
        is_finite = torch.isfinite(block.amax(1) - block.amin(1))
        padding_is_finite &= is_finite.all()
        if not bool(is_finite.all()):
            block = torch.where(response_mask[first:last], block, 0.0)
        masked = block * live
        facts[0, first:last] = torch.where(length == end, length.to(torch.float64), -1.0)
        facts[1, first:last] = torch.add(masked, 1 - live, alpha=torch.finfo(values.dtype).max).amin(1)
        facts[2, first:last] = masked.amax(1)
        facts[3, first:last] = masked.sum(1)
    facts = facts.cpu()
    lengths, lowest, highest, total = facts.unbind()
    _raise_on_bad_row(name, values, response_mask, facts)
    is_empty = lengths == 0
    return RowFacts(
        lengths=lengths.to(torch.int64),
        lowest=torch.where(is_empty, 0.0, lowest).clamp(min=0.0),
        highest=highest.clamp(min=0.0),
        total=total,
        padding_is_finite=bool(padding_is_finite),
    )


def _raise_on_bad_row(name: str, values: Tensor, response_mask: Tensor, facts: Tensor) -> None:
    lengths, lowest, highest, _ = facts.unbind()
    misaligned = torch.nonzero(lengths < 0)
    if len(misaligned):
        row = int(misaligned[0])
        gap = int(torch.nonzero(~response_mask[row])[0])
        raise DataError(
            f"response_mask[{row}] is not left-aligned: False at {gap}, True after it; expected the response's tokens "
            "first, then padding"
        )
    live = lengths > 0
    bad = live & ~((lowest >= LOWEST_ENTROPY) & torch.isfinite(highest))
    if bool(bad.any()):
        row = int(torch.nonzero(bad)[0])
        tokens = values[row, : int(lengths[row])].cpu()
        position = int(torch.nonzero(~((tokens >= LOWEST_ENTROPY) & torch.isfinite(tokens)))[0])
        raise DataError(
            f"{name}[{row}, {position}] = {float(tokens[position])}: expected a finite value of at least "
            f"{LOWEST_ENTROPY}"
        )
