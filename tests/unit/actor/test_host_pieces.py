"""Host memory in pieces that torch, which rounds page-locked blocks up to powers of two, takes as they are."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gtpo_megatron.actor import host_pieces as module
from gtpo_megatron.actor.host_pieces import LEAST_BYTES, PIECE_BYTES, host_pieces, piece_sizes, split_like

MIB = 1 << 20


@given(st.integers(0, 1 << 38))
def test_rounded_up_pieces_take_at_most_a_mebibyte_more(num_bytes):
    sizes = piece_sizes(num_bytes)
    assert sum(sizes) == num_bytes
    assert max(sizes) <= PIECE_BYTES
    rounded = sum(1 << (size - 1).bit_length() if size else 0 for size in sizes)
    assert rounded - num_bytes < LEAST_BYTES
    assert len(sizes) <= num_bytes // PIECE_BYTES + 7


@pytest.mark.parametrize(
    ("num_bytes", "sizes"),
    [
        (0, [0]),
        (5, [5]),
        (33 * MIB, [32 * MIB, MIB]),
        (129 * MIB + 3, [64 * MIB, 64 * MIB, MIB, 3]),
    ],
)
def test_sizes(num_bytes, sizes):
    assert piece_sizes(num_bytes) == sizes


def test_without_a_gpu_the_pieces_are_one_block():
    pieces = host_pieces(3 * MIB + 1, pin=False)
    assert [len(piece) for piece in pieces] == [2 * MIB, MIB, 1]
    assert {piece.untyped_storage().data_ptr() for piece in pieces} == {pieces[0].data_ptr()}


def test_page_locked_pieces_are_blocks_of_their_own(monkeypatch):
    asked = []
    empty = torch.empty

    def taken(size, *, dtype, pin_memory):
        asked.append((size, pin_memory))
        return empty(size, dtype=dtype)

    monkeypatch.setattr(module.torch, "empty", taken)
    host_pieces(3 * MIB, pin=True)
    assert asked == [(2 * MIB, True), (MIB, True)]


def test_views_of_the_pieces_lengths():
    flat = torch.arange(7, dtype=torch.uint8)
    parts = split_like(flat, [torch.empty(4), torch.empty(3)])
    assert [part.tolist() for part in parts] == [[0, 1, 2, 3], [4, 5, 6]]
