"""Weights that add up to what the loss is divided by."""

import pytest
import torch

from gtpo_megatron.algorithms.losses.denominators import row_weights

LENGTHS, GROUPS = torch.tensor([3, 1, 0, 4]), torch.tensor([1, 1, 0, 0])


@pytest.mark.parametrize(
    ("denominator", "is_sequence_level", "wanted"),
    [
        ("batch", False, [1, 1, 0, 1]),
        ("batch", True, [1, 1, 0, 1]),
        ("response", False, [1 / 3, 1, 0, 1 / 4]),
        ("group", False, [1 / 4, 1 / 4, 0, 1 / 4]),
        ("group", True, [1 / 2, 1 / 2, 0, 1]),
    ],
)
def test_row_weights(denominator: str, is_sequence_level: bool, wanted: list[float]) -> None:
    got = row_weights(denominator, LENGTHS, GROUPS, is_sequence_level=is_sequence_level)
    assert got.tolist() == pytest.approx(wanted)


def test_no_rows() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert row_weights("group", none, none, is_sequence_level=False).shape == (0,)
