"""Stand-ins for entropy."""

import torch

from gtpo_megatron.algorithms import controls
from tests.unit.algorithms.test_table import build

VALUES = torch.tensor([[1.0, 2.0, 3.0, 9.0], [4.0, 5.0, 9.0, 9.0]])
MASK = torch.tensor([[True, True, True, False], [True, True, False, False]])


def test_stand_ins() -> None:
    def stand_in(source: str) -> torch.Tensor:
        return controls.stand_in(source, VALUES, MASK, old_logprobs=-2 * VALUES, seed=0)

    assert stand_in("entropy") is VALUES
    assert torch.equal(stand_in("uniform"), torch.ones(2, 4))
    assert torch.equal(stand_in("surprisal"), 2 * VALUES)
    assert torch.equal(stand_in("shuffled"), controls.shuffle_within_rows(VALUES, MASK, 0))


def test_shuffling_within_rows_permutes_tokens_only() -> None:
    seen = set()
    for seed in range(60):
        shuffled = controls.shuffle_within_rows(VALUES, MASK, seed)
        assert shuffled[0, :3].sort().values.tolist() == [1, 2, 3]
        assert shuffled[1, :2].sort().values.tolist() == [4, 5]
        assert shuffled[:, 3].tolist() == [9, 9]
        seen.add(tuple(shuffled[0].tolist()))
    assert len(seen) == 6  # every order of three


def test_shuffling_within_segments_keeps_sides_and_groups() -> None:
    table = build([1, 1, 1, 0, 0, 1], [0, 0, 0, 0, 0, 1], [1, 2, 3, 1, 2, 1])
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], dtype=torch.float64)
    seen = set()
    for seed in range(30):
        shuffled = controls.shuffle_within_segments(table, values, seed, spans_batch=False)
        assert shuffled[:3].sort().values.tolist() == [1, 2, 3]
        assert shuffled[3:5].sort().values.tolist() == [4, 5]
        assert float(shuffled[5]) == 6
        seen.add(tuple(shuffled[:3].tolist()))
    assert len(seen) == 6
    batch = controls.shuffle_within_segments(table, values, 1, spans_batch=True)
    assert batch[[0, 1, 2, 5]].sort().values.tolist() == [1, 2, 3, 6]


def test_neutral_rows_weigh_one() -> None:
    assert controls.neutralise_side(VALUES, torch.tensor([True, False])).tolist() == [[1.0] * 4, VALUES[1].tolist()]
