"""The reduction of one process gives back what is here."""

import torch

from gtpo_megatron.algorithms.batch.reduction import LocalReduction


def test_identity() -> None:
    reduction = LocalReduction()
    values = torch.tensor([1, 2])
    assert torch.equal(reduction.sum(values), values)
    assert torch.equal(reduction.max(values), values)
    rows, mine = reduction.gather_rows(lambda: torch.zeros(3, 6, dtype=torch.int64), "any")
    assert rows.shape == (3, 6)
    assert mine == slice(0, 3)
    assert torch.equal(reduction.gather_values(values), values)
