"""Weights that add up to what the loss is divided by."""

import pytest
import torch

from gtpo_megatron.algorithms import Denominator

LENGTHS, GROUPS = torch.tensor([3, 1, 0, 4]), torch.tensor([1, 1, 0, 0])


@pytest.mark.parametrize(
    ("unit", "per_response", "wanted", "total"),
    [
        ("batch", False, [1, 1, 0, 1], 8),
        ("batch", True, [1, 1, 0, 1], 3),
        ("response", False, [1 / 3, 1, 0, 1 / 4], 3),
        ("response", True, [1, 1, 0, 1], 3),
        ("group", False, [1 / 4, 1 / 4, 0, 1 / 4], 2),
        ("group", True, [1 / 2, 1 / 2, 0, 1], 2),
    ],
)
def test_row_weights(unit: str, per_response: bool, wanted: list[float], total: float) -> None:
    denominator = Denominator(unit=unit)
    got = denominator.row_weights(LENGTHS, GROUPS, per_response=per_response)
    assert got.dtype == torch.float64
    assert got.tolist() == pytest.approx(wanted)
    assert float(denominator.total(got, LENGTHS, per_response=per_response)) == pytest.approx(total)
    assert float(denominator.of_batch(LENGTHS, GROUPS, per_response=per_response)) == total


@pytest.mark.parametrize("unit", ["batch", "response", "group"])
@pytest.mark.parametrize("per_response", [False, True])
def test_parts_of_a_batch_add_up(unit: str, per_response: bool) -> None:
    denominator = Denominator(unit=unit)
    weights = denominator.row_weights(LENGTHS, GROUPS, per_response=per_response)
    parts = [
        float(denominator.total(weights[rows], LENGTHS[rows], per_response=per_response))
        for rows in ([0, 2], [], [1, 3])
    ]
    whole = float(denominator.total(weights, LENGTHS, per_response=per_response))
    assert sum(parts) == pytest.approx(whole)


def test_every_response_can_count_as_many_tokens() -> None:
    denominator = Denominator(tokens_per_response=10)
    weights = denominator.row_weights(LENGTHS, None, per_response=False)
    assert weights.tolist() == [1, 1, 0, 1]
    assert float(denominator.total(weights, LENGTHS, per_response=False)) == 30


def test_no_rows() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    for unit in ("batch", "response", "group"):
        assert Denominator(unit=unit).row_weights(none, none, per_response=False).shape == (0,)
        assert float(Denominator(unit=unit).total(none.double(), none, per_response=False)) == 0


def test_the_denominator_of_a_batch_does_not_depend_on_the_order_of_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths, groups = torch.randint(0, 50, (48,), generator=generator), torch.arange(48) % 7
    orders = [torch.randperm(48, generator=generator) for _ in range(20)]
    found = {
        float(Denominator(unit="group").of_batch(lengths[order], groups[order], per_response=False)) for order in orders
    }
    assert found == {7.0}
    constant = Denominator(tokens_per_response=13)
    assert float(constant.of_batch(lengths, groups, per_response=False)) == 13 * int((lengths > 0).sum())
