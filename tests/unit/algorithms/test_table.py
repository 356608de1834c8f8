"""The table of responses: groups by label, sides by threshold, rows without tokens nowhere."""

import torch
from gtpo_megatron.algorithms.rows import RowFacts
from gtpo_megatron.algorithms.table import ResponseTable, gather_table

from gtpo_megatron.algorithms.batch.reduction import LocalReduction


def build(rewards: list[float], labels: list[int], lengths: list[int], threshold: float = 0.5) -> ResponseTable:
    ones = torch.ones(len(rewards), dtype=torch.float64)
    facts = RowFacts(
        lengths=torch.tensor(lengths),
        lowest=ones * 2,
        highest=ones * 3,
        total=ones,
        has_negatives=False,
        padding_is_harmless=True,
    )
    return gather_table(
        lambda: (torch.tensor(rewards), torch.tensor(labels), facts, ones * 4),
        success_threshold=threshold,
        reduction=LocalReduction(),
        signature="",
    )


def test_groups_and_sides() -> None:
    table = build([1.0, 0.0, 0.5, 1.0, 1.0], [2**62, -5, -5, 2**62, 3], [1, 2, 3, 0, 4])
    assert table.group_index.tolist() == [2, 0, 0, 2, 1]
    assert table.num_groups == 3
    assert table.is_correct.tolist() == [True, False, True, False, True]
    assert table.is_live.tolist() == [True, True, True, False, True]
    correct, wrong = table.counts_by_side()
    assert correct.tolist() == [1, 1, 1]
    assert wrong.tolist() == [1, 0, 0]
    assert table.is_one_sided.tolist() == [False, True, True]
    assert table.mine.tolist() == [0, 1, 2, 3, 4]
    assert table.lowest.tolist() == [2.0] * 5
    assert table.highest.tolist() == [3.0] * 5
    assert table.mean.tolist() == [4.0] * 5


def test_the_threshold_is_reached_or_not() -> None:
    assert build([0.3, 0.29], [0, 0], [1, 1], threshold=0.3).is_correct.tolist() == [True, False]
    assert build([0.7, 0.69], [0, 0], [1, 1], threshold=0.7).is_correct.tolist() == [True, False]
