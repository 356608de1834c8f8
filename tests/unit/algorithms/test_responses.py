"""One value a response, and back to its tokens."""

from dataclasses import replace

import torch
from gtpo_megatron.algorithms.pools import Standardised
from gtpo_megatron.algorithms.responses import one_token_table, response_values, spread_over_tokens

from tests.unit.algorithms.test_table import build


def test_every_response_has_one_token() -> None:
    values = torch.tensor([4.0, 5.0, 0.0], dtype=torch.float64)
    table = one_token_table(build([1, 0, 0], [0, 0, 0], [7, 3, 0]), values)
    assert table.lengths.tolist() == [1, 1, 0]
    assert table.highest.tolist() == table.lowest.tolist() == [4.0, 5.0, 0.0]
    assert table.mine.tolist() == [0, 1, 2]
    shares = response_values(values)
    assert torch.equal(shares.origin, values)  # deviations from itself: none
    assert not shares.values.any()
    assert shares.values.shape == (3, 1)


def test_spread() -> None:
    column = Standardised(
        shaped_rewards=torch.tensor([[1.0], [2.0], [3.0]]),
        advantages=torch.tensor([[4.0], [5.0], [6.0]]),
        flips=torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64),
    )
    mask = torch.tensor([[True, False], [True, True]])
    table = replace(build([1, 0, 0], [0, 0, 0], [1, 3, 2]), owners=torch.tensor([1, 0, 1]), rank=1)
    spread = spread_over_tokens(column, table, mask.flip(0))
    assert spread.shaped_rewards.tolist() == [[1.0, 1.0], [3.0, 0.0]]
    assert spread.advantages.tolist() == [[4.0, 4.0], [6.0, 0.0]]
    assert spread.flips.tolist() == [1, 2]  # a response's sign is that of all its tokens
