"""A checksum of a tensor that adds up over its slices.

``sum over elements of bits(x_i) * (2 i + 1) * GOLDEN  mod 2^64``, i the row-major index. Order-sensitive (two swapped
elements change it), exact for any split into boxes, and equal only if all bits are.
"""

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
"""2^64 / golden ratio, odd: spreads consecutive indices over all 64 bits."""

_CHUNK_ROWS_ELEMENTS = 1 << 20
"""Elements handled at a time: bounds the int64 temporaries to 16 MiB."""

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def slice_checksum(box: Tensor, *, row: int, column: int, num_columns: int) -> int:
    """The share of a box in its tensor's checksum.

    Args:
        box: ``[rows, columns]``, of any floating dtype.
        row: of the box's first element in the full tensor.
        column: of the box's first element in the full tensor.
        num_columns: of the full tensor.

    Returns:
        An integer in ``[0, 2^64)``; shares of disjoint boxes add modulo 2^64.
    """
    signed_golden = GOLDEN - 2**64  # int64 products wrap modulo 2^64, which is the arithmetic wanted
    rows_at_once = max(1, _CHUNK_ROWS_ELEMENTS // max(1, box.shape[1]))
    columns = torch.arange(column, column + box.shape[1], dtype=torch.int64, device=box.device)
    total = 0
    for start in range(0, box.shape[0], rows_at_once):
        part = box[start : start + rows_at_once].contiguous()
        bits = part.view(_BITS[part.dtype.itemsize]).to(torch.int64)
        first = row + start
        rows = torch.arange(first, first + part.shape[0], dtype=torch.int64, device=box.device)
        index = rows[:, None] * num_columns + columns[None, :]
        total += int((bits * (2 * index + 1) * signed_golden).sum())
    return total % 2**64


def tensor_checksum(tensor: Tensor) -> int:
    """The checksum of a full tensor of one or two dims."""
    matrix = tensor if tensor.ndim == 2 else tensor.reshape(-1, 1)
    return slice_checksum(matrix, row=0, column=0, num_columns=matrix.shape[1])
