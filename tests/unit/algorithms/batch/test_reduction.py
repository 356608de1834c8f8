"""On one process a total is what is here; of keys that are split over ranks only these travel."""

import torch

from gtpo_megatron.algorithms.batch.reduction import LocalReduction, SharedRange, SplitKeys
from tests.faked_ranks import World


def test_identity() -> None:
    reduction = LocalReduction()
    values = torch.tensor([1, 2])
    assert torch.equal(reduction.sum(values), values)
    assert torch.equal(reduction.max(values), values)
    assert torch.equal(reduction.exchange(values, [SharedRange(members=(0,), size=2)], "sum"), values)
    gathered = reduction.gather_rows(lambda: torch.zeros(3, 6, dtype=torch.int64), "any")
    assert gathered.table.shape == (3, 6)
    assert gathered.owners.tolist() == [0, 0, 0]
    assert gathered.rank == 0
    assert torch.equal(reduction.gather_values(values), values)


def test_only_split_keys_are_added_up() -> None:
    """Keys 1 and 3 of rank 0 are keys 2 and 0 of rank 1; the others are each rank's own."""
    index = [[1, 3], [2, 0]]

    def totals(reduction):
        split = SplitKeys(
            index=torch.tensor(index[reduction.rank]),
            ranges=[SharedRange(members=(0, 1), size=2)],
            reduction=reduction,
        )
        values = torch.arange(4) + 10 * reduction.rank
        return split.sum(values.clone()).tolist(), split.max(values.double()).tolist()

    first, second = World(2).run(totals)
    assert first == ([0, 1 + 12, 2, 3 + 10], [0.0, 12.0, 2.0, 10.0])
    assert second == ([10 + 3, 11, 12 + 1, 13], [10.0, 11.0, 12.0, 13.0])
