"""On one process a total is what is here."""

import torch

from gtpo_megatron.algorithms.batch.reduction import LocalReduction, SharedRange


def test_identity() -> None:
    reduction = LocalReduction()
    values = torch.tensor([1, 2])
    assert torch.equal(reduction.sum(values), values)
    assert torch.equal(reduction.max(values), values)
    assert torch.equal(reduction.exchange(values, [SharedRange(members=(0,), size=2)]), values)
    gathered = reduction.gather_rows(lambda: torch.zeros(3, 6, dtype=torch.int64), "any")
    assert gathered.table.shape == (3, 6)
    assert gathered.owners.tolist() == [0, 0, 0]
    assert gathered.rank == 0
