"""A checksum of a tensor that adds up over its slices.

``sum over elements of bits(x_i) * (2 i + 1) * GOLDEN  mod 2^64``, i the row-major index. Order-sensitive (two swapped
elements change it), exact for any split into boxes, and equal only if all bits are.
"""

import torch
from torch import Tensor

Checksums = dict[int, dict[str, int]]
"""Worker -> Hugging Face name -> checksum of what the worker keeps of the tensor."""

GOLDEN = 0x9E3779B97F4A7C15
"""2^64 / golden ratio, odd: spreads consecutive indices over all 64 bits."""

_BLOCK_ELEMENTS = {"cpu": 1 << 16, "cuda": 1 << 25}
"""Elements converted to int64 at a time: on a CPU they stay in a core's cache."""

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def slice_checksum(box: Tensor, *, row: int, column: int, num_columns: int) -> int:
    """The share of a box in its tensor's checksum.

    Args:
        box: ``[rows, columns]``, of any floating dtype.
        row: row of the box's first element in the full tensor.
        column: column of the box's first element in the full tensor.
        num_columns: number of columns of the full tensor.

    Returns:
        An integer in ``[0, 2^64)``; shares of disjoint boxes add modulo 2^64.
    """
    num_rows, width = box.shape
    rows_at_once = max(1, _BLOCK_ELEMENTS.get(box.device.type, 1 << 25) // max(1, width))
    by_row = torch.empty(num_rows, dtype=torch.int64, device=box.device)
    by_column = torch.zeros(width, dtype=torch.int64, device=box.device)
    for start in range(0, num_rows, rows_at_once):
        part = box[start : start + rows_at_once].contiguous()
        bits = part.view(_BITS[part.dtype.itemsize]).to(torch.int64)
        torch.sum(bits, 1, out=by_row[start : start + len(bits)])
        by_column += bits.sum(0)
    # sum b_rc (2 (r n + c) + 1) = sum_r B_r (2 r n + 1) + 2 sum_c B_c c; int64 wraps modulo 2^64, which is wanted
    rows = torch.arange(row, row + num_rows, dtype=torch.int64, device=box.device)
    columns = torch.arange(column, column + width, dtype=torch.int64, device=box.device)
    total = int((by_row * (2 * num_columns * rows + 1)).sum()) + 2 * int((by_column * columns).sum())
    return total * GOLDEN % 2**64
