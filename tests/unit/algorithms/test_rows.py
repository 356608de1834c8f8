"""Row facts, and blocks that cover every row with tokens once."""

import math

import pytest
import torch
from gtpo_megatron.algorithms.rows import left_aligned_lengths, length_blocks, row_blocks, row_facts
from gtpo_megatron.algorithms.scratch import Scratch

from gtpo_megatron.errors import DataError


def aligned(lengths: list[int], width: int) -> torch.Tensor:
    return torch.arange(width) < torch.tensor(lengths)[:, None]


def test_facts() -> None:
    values = torch.tensor([[3.0, 1.0, math.nan], [2.0, 4.0, 6.0], [math.inf, 0.0, 0.0]])
    facts = row_facts("h", values, aligned([2, 3, 0], 3), finds_lowest=True)
    assert facts.lengths.tolist() == [2, 3, 0]
    assert facts.lowest.tolist() == [1, 2, 0]
    assert facts.highest.tolist() == [3, 6, 0]
    assert facts.total.tolist() == [4, 12, 0]
    assert not facts.padding_is_harmless
    assert not facts.has_negatives
    unasked = row_facts("h", values.nan_to_num(posinf=0.0), aligned([2, 3, 0], 3))
    assert unasked.lowest.tolist() == [0, 0, 0]
    assert unasked.padding_is_harmless


def test_small_negatives_count_as_zero_and_are_told() -> None:
    facts = row_facts("h", torch.tensor([[-5e-5, 1.0]]), aligned([2], 2), finds_lowest=True)
    assert facts.lowest.tolist() == [0]
    assert facts.has_negatives


@pytest.mark.parametrize("width", [1, 2, 7, 64, 65])
def test_lengths_by_bisection(width: int) -> None:
    lengths = list(range(width + 1))
    assert left_aligned_lengths(aligned(lengths, width)).tolist() == lengths


def test_every_misaligned_mask_is_refused() -> None:
    width = 5
    for bits in range(1 << width):
        row = [bool(bits >> t & 1) for t in range(width)]
        mask = torch.tensor([[True] * width, row])
        if row == sorted(row, reverse=True):
            assert left_aligned_lengths(mask).tolist() == [width, sum(row)]
        else:
            with pytest.raises(DataError, match=r"response_mask\[1\] is not left-aligned"):
                left_aligned_lengths(mask)


def test_blocks_cover_rows_with_tokens_once() -> None:
    lengths = torch.tensor([0, 3, 0, 5, 1, 5, 0])
    values = torch.arange(7 * 5, dtype=torch.float32).view(7, 5)
    order, blocks = length_blocks(lengths, values)
    rows = torch.cat([block.rows for block in blocks])
    assert sorted(rows.tolist()) == [1, 3, 4, 5]
    assert torch.equal(order[: len(rows)], rows)
    for block in blocks:
        assert block.width == int(lengths[block.rows].max())
        assert block.full == int(lengths[block.rows].min())
        target = torch.full((7, 5), -1.0)
        picked = block.clear_padding(block.pick(values, Scratch(values.device), "p"), aligned(lengths.tolist(), 5))
        block.put(picked, target)
        wanted = torch.where(aligned(lengths.tolist(), 5), values, 0.0)
        assert torch.equal(target[block.rows], wanted[block.rows])
    assert length_blocks(torch.zeros(3, dtype=torch.int64), values[:3])[1] == []


def test_row_blocks_cover_all_rows() -> None:
    tensor = torch.empty(10, 1 << 16)
    assert [row for first, last in row_blocks(tensor) for row in range(first, last)] == list(range(10))
    assert list(row_blocks(torch.empty(3, 0))) == []
