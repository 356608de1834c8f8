"""One entropy a response."""

import math

import pytest
import torch
from gtpo_megatron.algorithms.rows import row_facts
from gtpo_megatron.algorithms.sequence_entropy import sequence_entropy

VALUES = torch.tensor([[0.5, 2.0, 1.0], [0.2, 7.0, 7.0], [9.0, 9.0, 9.0]])
MASK = torch.arange(3) < torch.tensor([3, 1, 0])[:, None]


def means(**options: object) -> list[float]:
    facts = row_facts("h", VALUES, MASK, finds_lowest=True)
    chosen = {"is_geometric": False, "floor": 0.0, "clip": None, **options}
    return sequence_entropy(VALUES, MASK, facts, **chosen).tolist()


def test_arithmetic_and_geometric() -> None:
    assert means() == pytest.approx([3.5 / 3, 0.2, 0])
    assert means(is_geometric=True) == pytest.approx([1.0, 0.2, 0])
    assert means(floor=0.1, clip=(0.3, 1.0)) == pytest.approx([2.5 / 3 + 0.1 - 0.2 / 3 + 0.2 / 3, 0.4, 0])
    clipped = [0.6, 1.1, 1.1]
    assert means(is_geometric=True, floor=0.1, clip=(0.3, 1.0))[0] == pytest.approx(math.prod(clipped) ** (1 / 3))


def test_only_chosen_tokens() -> None:
    kept = torch.tensor([[True, False, True], [True, True, True], [True, True, True]]) & MASK
    assert means(averaged=kept) == pytest.approx([0.75, 0.2, 0])


def test_padding_changes_no_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(3, 101, generator=generator)
    mask = torch.arange(101) < torch.tensor([101, 37, 60])[:, None]
    wide = torch.nn.functional.pad(values, (0, 400), value=3.0)
    wide_mask = torch.nn.functional.pad(mask, (0, 400))
    for geometric in (False, True):
        left, right = (
            sequence_entropy(v, m, row_facts("h", v, m), is_geometric=geometric, floor=1e-8, clip=None)
            for v, m in ((values, mask), (wide, wide_mask))
        )
        assert torch.equal(left, right)
