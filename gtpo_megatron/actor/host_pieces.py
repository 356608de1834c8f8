"""The host's memory for copies of what is on a GPU."""

import torch
from torch import Tensor

PIECE_BYTES = 64 << 20
"""Largest piece; ``companions/planner/hardware.py`` has the same number."""

LEAST_BYTES = 1 << 20
"""A rest below this is one piece, whatever torch makes of it."""


def host_pieces(num_bytes: int, *, pin: bool) -> list[Tensor]:
    """Memory on the host for so many bytes, in pieces ``[bytes]`` uint8.

    Torch rounds every block of page-locked memory up to a power of two, so that a copy of an optimizer's state could
    take twice its size. Pieces are powers of two, but for a last one of less than ``LEAST_BYTES``.

    Args:
        num_bytes: number of bytes of all pieces together.
        pin: page-locked, which needs a GPU; else the pieces are of one block of ordinary memory.
    """
    sizes = piece_sizes(num_bytes)
    if not pin:
        return list(torch.split(torch.empty(num_bytes, dtype=torch.uint8), sizes))
    return [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes]


def piece_sizes(num_bytes: int) -> list[int]:
    """Bytes of each piece: as many of the largest as fit, then the binary digits of the rest."""
    sizes = [PIECE_BYTES] * (num_bytes // PIECE_BYTES)
    rest = num_bytes % PIECE_BYTES
    while rest >= LEAST_BYTES:
        sizes.append(1 << (rest.bit_length() - 1))
        rest -= sizes[-1]
    return [*sizes, rest] if rest or not sizes else sizes


def split_like(flat: Tensor, pieces: list[Tensor]) -> tuple[Tensor, ...]:
    """Views of ``flat`` as long as the pieces."""
    return torch.split(flat, [len(piece) for piece in pieces])
