"""Sums over rows that no order of terms and no padding can change."""

import torch
from torch import Tensor

from gtpo_megatron.algorithms.fixed_point import grid_unit, integer_sums


def row_sums(values: Tensor, bound: Tensor, longest: int, *, out: Tensor) -> Tensor:
    """Sum of each row; every term is first rounded to a grid that follows from the row's bound alone.

    Args:
        values: ``[R, W]`` float64, 0 at padding.
        bound: ``[R]`` float64, at least the largest magnitude in each row.
        longest: terms of the longest row of the whole batch.
        out: of the shape of ``values``, overwritten; may be ``values``.

    Returns:
        ``[R]`` float64; each term was off by ``2 ** -51`` of the bound (``2 ** -(62 - log2 longest)`` if larger).
    """
    unit = grid_unit(bound, longest)
    return integer_sums(values, unit[:, None], 1, out=out).to(torch.float64) * unit


def sums_and_squares(values: Tensor, bound: Tensor, longest: int, *, squares: Tensor, out: Tensor) -> None:
    """``row_sums`` of the values and of their squares.

    Args:
        values: ``[R, W]`` float64, 0 at padding; used up.
        bound: ``[R]`` float64, at least the largest magnitude in each row.
        longest: terms of the longest row of the whole batch.
        squares: of the shape of ``values``, overwritten.
        out: ``[2, R]`` float64, written.
    """
    torch.mul(values, values, out=squares)
    out[0] = row_sums(values, bound, longest, out=values)
    out[1] = row_sums(squares, bound * bound, longest, out=squares)
