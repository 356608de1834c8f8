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
from gtpo_megatron.algorithms.row_sums import row_sums
from gtpo_megatron.algorithms.scratch import Scratch
from gtpo_megatron.errors import DataError, ShapeError

LOWEST_ENTROPY = -1e-4
"""Nats. Rounding may leave an entropy slightly below 0 (it becomes 0); anything lower is a bug upstream."""

_BLOCK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 25}
"""Elements of a block: on the CPU its float64 temporaries stay in the L2 cache, on a GPU a block fills the device."""

_MASK_BLOCK_ROWS = 64

_MOST_TOKENS = 1 << 22
"""No response is longer. A constant, so that sums over a row do not depend on the padding or on other rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowFacts:
    """A few numbers of each row of a ``[B, T]`` tensor of weights; a row without tokens has zeros.

    Attributes:
        lengths: ``[B]`` int64.
        lowest: ``[B]`` float64, smallest value on a response token, at least 0; 0 where it was not asked for.
        highest: ``[B]`` float64, largest one.
        total: ``[B]`` float64, sum over response tokens, the same bit for bit whatever the padding; for diagnostics.
        has_negatives: some value is below 0 by rounding.
        padding_is_harmless: everything outside the mask is finite and not negative, so that neither it nor its inverse
            (after the floor is added) turns into NaN when it is multiplied by 0.
    """

    lengths: Tensor
    lowest: Tensor
    highest: Tensor
    total: Tensor
    has_negatives: bool
    padding_is_harmless: bool


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


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthBlock:
    """Rows of about one length, so that hardly any padding is computed.

    Attributes:
        rows: ``[R]`` int64 on the tensors' device.
        first: where they begin in the order by length.
        width: longest of them, tokens.
        full: shortest of them: up to here no mask is needed.
    """

    rows: Tensor
    first: int
    width: int
    full: int

    @property
    def part(self) -> slice:
        """Their place in the order by length."""
        return slice(self.first, self.first + len(self.rows))

    def pick(self, values: Tensor, scratch: Scratch, name: str) -> Tensor:
        """``[R, width]`` copy of these rows."""
        out = scratch.take(name, (len(self.rows), self.width), values.dtype)
        return torch.index_select(values[:, : self.width], 0, self.rows, out=out)

    def put(self, values: Tensor, target: Tensor) -> None:
        """Writes ``[R, width]`` to these rows of ``target`` ``[B, T]``."""
        target[:, : self.width].index_copy_(0, self.rows, values)

    def clear_padding(self, block: Tensor, response_mask: Tensor) -> Tensor:
        """Sets what lies outside the mask to 0, in place."""
        if self.full < self.width:
            tail = block[:, self.full :]
            tail.copy_(torch.where(response_mask[:, self.full : self.width].index_select(0, self.rows), tail, 0.0))
        return block


def length_blocks(lengths: Tensor, values: Tensor) -> tuple[Tensor, list[LengthBlock]]:
    """Blocks of rows with tokens, longest first, and the order of rows that they follow.

    Args:
        lengths: ``[B]`` int64 on the CPU.
        values: ``[B, T]``, whose device and block size count.
    """
    order = torch.argsort(lengths, descending=True, stable=True)
    ordered = lengths[order].tolist()
    on_device = order.to(values.device)
    budget = block_elements(values)
    blocks, first = [], 0
    while first < len(ordered) and ordered[first]:
        last = min(first + max(1, budget // ordered[first]), len(ordered))
        while not ordered[last - 1]:
            last -= 1
        blocks.append(
            LengthBlock(rows=on_device[first:last], first=first, width=ordered[first], full=ordered[last - 1])
        )
        first = last
    return order, blocks


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


def check_finite(response_mask: Tensor, **tensors: Tensor) -> None:
    """Values of response tokens are finite; looks at every value, hence waits for a GPU.

    Args:
        response_mask: ``[B, T]`` bool.
        tensors: ``[B, T]`` float by name.

    Raises:
        DataError: one is not; field, row, position and value.
    """
    for name, tensor in tensors.items():
        values = tensor.detach()
        bad = response_mask & ~torch.isfinite(values)
        if bool(bad.any()):
            row, position = torch.nonzero(bad)[0].tolist()
            raise DataError(f"{name}[{row}, {position}] = {float(values[row, position])}: expected a finite value")


def left_aligned_lengths(response_mask: Tensor) -> Tensor:
    """Number of tokens of each row, ``[B, T]`` bool -> ``[B]`` int64 on the CPU.

    Raises:
        DataError: a row has a token after padding.
    """
    for first in range(0, len(response_mask), _MASK_BLOCK_ROWS):
        block = response_mask[first : first + _MASK_BLOCK_ROWS].contiguous().view(torch.uint8)
        resumes = torch.gt(block[:, 1:], block[:, :-1])
        if resumes.numel() and int(resumes.view(torch.uint8).amax()):  # any() is ten times slower
            row = int(resumes.any(1).nonzero()[0])
            gap = int(torch.nonzero(block[row] == 0)[0])
            raise DataError(
                f"response_mask[{first + row}] is not left-aligned: False at {gap}, True after it; expected the "
                "response's tokens first, then padding"
            )
    return _first_false(response_mask).cpu()


def _first_false(mask: Tensor) -> Tensor:
    """Where each row of a left-aligned mask ends, by bisection: a few look-ups a row instead of a sum over it."""
    low = torch.zeros(len(mask), dtype=torch.int64, device=mask.device)
    high = torch.full_like(low, mask.shape[1])
    for _ in range(mask.shape[1].bit_length()):
        middle = (low + high) // 2
        is_live = mask.gather(1, middle.clamp(max=mask.shape[1] - 1)[:, None])[:, 0] & (middle < high)
        low = torch.where(is_live, middle + 1, low)
        high = torch.where(is_live, high, middle)
    return low


def row_facts(
    name: str, values: Tensor, response_mask: Tensor, *, finds_lowest: bool = False, is_negated: bool = False
) -> RowFacts:
    """Validates ``values`` and summarises each row.

    Args:
        name: of ``values``, for messages.
        values: ``[B, T]`` float32 or float64; anything outside the mask.
        response_mask: ``[B, T]`` bool.
        finds_lowest: also find each row's smallest value.
        is_negated: ``values`` are minus what ``name`` names; messages then show the latter.

    Raises:
        DataError: a mask that is not left-aligned, or a value that is NaN, infinite or below ``LOWEST_ENTROPY``.
    """
    lengths = left_aligned_lengths(response_mask)
    order, blocks = length_blocks(lengths, values)
    ends = torch.zeros(2, len(values), dtype=values.dtype, device=values.device)
    totals = torch.zeros(len(values), dtype=torch.float64, device=values.device)
    scratch = Scratch(values.device)
    for block in blocks:
        picked = block.clear_padding(block.pick(values, scratch, "picked"), response_mask)
        torch.amin(picked, 1, out=ends[0, block.part])
        torch.amax(picked, 1, out=ends[1, block.part])
        bound = torch.maximum(ends[1, block.part], -ends[0, block.part]).to(torch.float64)
        exact = scratch.copy("exact", picked, torch.float64)
        totals[block.part] = row_sums(exact, bound, _MOST_TOKENS, out=exact)
        if finds_lowest:
            live = response_mask[:, : block.width].index_select(0, block.rows)
            torch.amin(picked.masked_fill(~live, torch.inf), 1, out=ends[0, block.part])
    by_row = torch.zeros(3, len(values), dtype=torch.float64)
    by_row[:2, order], by_row[2, order] = ends.cpu().to(torch.float64), totals.cpu()
    lowest, highest, total = by_row.unbind()
    _raise_on_bad_row(name, values, lengths, lowest, highest, is_negated=is_negated)
    return RowFacts(
        lengths=lengths,
        lowest=lowest.clamp(min=0.0) if finds_lowest else torch.zeros_like(lowest),
        highest=highest.clamp(min=0.0),
        total=total,
        has_negatives=bool((lowest < 0).any()),
        padding_is_harmless=_is_harmless(values),
    )


def _is_harmless(values: Tensor) -> bool:
    """All values, padding included, are finite and at least 0; one pass."""
    if not values.numel():
        return True
    low, high = torch.aminmax(values)  # NaN comes through
    return bool((low >= 0) & torch.isfinite(high))


def _raise_on_bad_row(
    name: str, values: Tensor, lengths: Tensor, lowest: Tensor, highest: Tensor, *, is_negated: bool
) -> None:
    bad = (lengths > 0) & ~((lowest >= LOWEST_ENTROPY) & torch.isfinite(highest))
    if bool(bad.any()):
        row = int(torch.nonzero(bad)[0])
        tokens = values[row, : int(lengths[row])].cpu()
        position = int(torch.nonzero(~((tokens >= LOWEST_ENTROPY) & torch.isfinite(tokens)))[0])
        value = float(tokens[position])
        shown, limit = (-value, f"<= {-LOWEST_ENTROPY}") if is_negated else (value, f">= {LOWEST_ENTROPY}")
        raise DataError(f"{name}[{row}, {position}] = {shown}: expected a finite value {limit}")
