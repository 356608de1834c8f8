"""Halves of packed sequences, for the ring in which context-parallel ranks pass on their keys and values; their order.

A rank holds two chunks of every sequence, an early one and a late one: its halves. ``cu_seqlens`` says where the rank's
own part of each sequence lies. Statistics are the logarithms of the softmax's sums, ``[heads, t]`` float32.
"""

from typing import Literal

import torch
from torch import Tensor

from tests.te_on_cpu.attention import bounds


def _half(cu_seqlens: Tensor, index: int) -> Tensor:
    """The places of every sequence's first (0) or second (1) half."""
    places = []
    for start, end in bounds(cu_seqlens):
        middle = (start + end) // 2
        places.append(torch.arange(middle, end) if index else torch.arange(start, middle))
    return torch.cat(places)


def _by_rank(cu_seqlens: Tensor, cp_size: int) -> Tensor:
    """The places of the tokens of rank 0, then of rank 1, and so on, among all ranks' sequences."""
    held: list[list[Tensor]] = [[] for _ in range(cp_size)]
    for start, end in bounds(cu_seqlens):
        chunks = torch.arange(start, end).chunk(2 * cp_size)
        for rank, places in enumerate(held):
            places += [chunks[rank], chunks[2 * cp_size - 1 - rank]]
    return torch.cat([place for places in held for place in places])


def thd_sequence_order_to_cp_rank_order(x: Tensor, cu_seqlens: Tensor, cp_size: int, length: int) -> Tensor:
    """``[T, ...]`` of whole sequences: the tokens of rank 0, then of rank 1, and so on."""
    order = _by_rank(cu_seqlens, cp_size)
    assert len(order) == length
    return x[order]


def thd_cp_rank_order_to_sequence_order(x: Tensor, cu_seqlens: Tensor, cp_size: int, length: int) -> Tensor:
    """And back."""
    order = _by_rank(cu_seqlens, cp_size)
    assert len(order) == length
    return x[order.argsort()]


def thd_read_half_tensor(x: Tensor, cu_seqlens: Tensor, index: int) -> Tensor:
    """``[t, heads, d]`` to ``[t / 2, heads, d]``; also ``[2, t, heads, d]``."""
    return x.index_select(x.dim() - 3, _half(cu_seqlens, index))


def thd_second_half_lse_correction(sums: Tensor, step: Tensor, cu_seqlens: Tensor, is_packed: bool) -> None:
    """Adds a step's sums ``[heads, t / 2]`` to those of the second halves, in place."""
    assert is_packed
    places = _half(cu_seqlens, 1)
    sums[:, places] = torch.logaddexp(sums[:, places], step[:, : len(places)])


def thd_read_second_half_lse(sums: Tensor, cu_seqlens: Tensor, is_packed: bool, length: int) -> Tensor:
    """``[heads, length]``: the sums of the second halves, then zeros."""
    assert is_packed
    places = _half(cu_seqlens, 1)
    found = sums.new_zeros(len(sums), length)
    found[:, : len(places)] = sums[:, places]
    return found


def thd_out_correction(
    out: Tensor,
    step_out: Tensor,
    old_sums: Tensor,
    sums: Tensor,
    step_sums: Tensor,
    cu_seqlens: Tensor,
    only_second_half: bool,
    is_packed: bool,
) -> None:
    """Adds a step's result to the one so far, each by its part of the softmax's sum; in place.

    Args:
        out: ``[t, heads, d]`` so far.
        step_out: as ``out``, or ``[t / 2, heads, d]`` of the second halves.
        old_sums: of ``out``.
        sums: of both.
        step_sums: of ``step_out``.
        cu_seqlens: see above.
        only_second_half: what ``step_out`` is of.
        is_packed: True.
    """
    assert is_packed
    places = _half(cu_seqlens, 1) if only_second_half else torch.arange(int(cu_seqlens[-1]))
    count = len(places)
    old_part = torch.exp(old_sums[:, places] - sums[:, places]).t()[..., None]
    step_part = torch.exp(step_sums[:, :count] - sums[:, places]).t()[..., None]
    out[places] = (out[places].float() * old_part + step_out[:count].float() * step_part).to(out.dtype)


Change = Literal["add", "copy", "none", "zero"]


def thd_grad_correction(grad: Tensor, step: Tensor, cu_seqlens: Tensor, first: Change, second: Change) -> None:
    """Puts a step's gradient ``[t, ...]``, or ``[t / 2, ...]`` if it is of one half, into the one so far; in place."""
    is_of_one_half = {first, second} & {"none", "zero"}
    for index, change in enumerate((first, second)):
        places = _half(cu_seqlens, index)
        if change == "zero":
            grad[places] = 0
        elif change != "none":
            theirs = step[: len(places)] if is_of_one_half else step[places]
            grad[places] = (grad[places].float() + theirs.float() if change == "add" else theirs).to(grad.dtype)
