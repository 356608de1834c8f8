"""Shares by hand, and segments too large for one chunk."""

import pytest
import torch

from gtpo_megatron.algorithms import rows as rows_module
from gtpo_megatron.algorithms.reduction import LocalReduction
from gtpo_megatron.algorithms.rows import row_facts
from gtpo_megatron.algorithms.share_grid import ShareRule, TokenWeights
from gtpo_megatron.algorithms.shares import Shares, entropy_shares
from gtpo_megatron.algorithms.table import gather_table
from tests.strategies import Batch, random_batch


def shares_of(batch: Batch, rule: ShareRule, shaping_mask: torch.Tensor | None = None) -> Shares:
    arguments = batch.arguments()
    facts = row_facts("h", arguments["token_entropy"], arguments["response_mask"], finds_lowest=True)
    none = torch.zeros(len(batch.rewards), dtype=torch.float64)
    table = gather_table(
        lambda: (arguments["rewards"], arguments["group_ids"], facts, none),
        success_threshold=0.5,
        reduction=LocalReduction(),
        signature="",
    )
    tokens = TokenWeights(
        values=arguments["token_entropy"], response_mask=arguments["response_mask"], shaping_mask=shaping_mask
    )
    return entropy_shares(tokens, table, rule, LocalReduction())


BATCH = Batch([[1.0, 3.0], [3.0], [1.0, 4.0], [3.0, 1.0]], [1, 1, 0, 0], [0] * 4)


@pytest.mark.parametrize(
    ("rule", "wanted"),
    [
        (ShareRule(floor=0.0), [[0.5, 1.0], [1.5, 0.0], [1.5, 0.4], [0.5, 1.6]]),
        (ShareRule(floor=0.0, axis="response"), [[0.5, 1.5], [1.0, 0.0], [1.6, 0.4], [0.5, 1.5]]),
        (
            ShareRule(floor=0.0, axis="matrix"),
            [[3 / 7, 9 / 7], [9 / 7, 0.0], [48 / 31, 12 / 31], [16 / 31, 48 / 31]],
        ),
        (
            ShareRule(floor=0.0, is_geometric=True),
            [[3**-0.5, 1.0], [3**0.5, 0.0], [3**0.5, 0.5], [3**-0.5, 2.0]],
        ),
    ],
)
def test_by_hand(rule: ShareRule, wanted: list[list[float]]) -> None:
    shares = shares_of(BATCH, rule)
    torch.testing.assert_close(shares.values, torch.tensor(wanted))
    assert shares.highest.tolist() == pytest.approx([max(row) for row in wanted])
    assert shares.lowest.tolist() == pytest.approx([min(v for v in row if v) for row in wanted])
    assert shares.total.tolist() == pytest.approx([sum(row) for row in wanted])
    assert shares.total_square.tolist() == pytest.approx([sum(v * v for v in row) for row in wanted])
    assert shares.count.tolist() == [2, 1, 2, 2]


def test_excluded_tokens_have_share_one() -> None:
    kept = torch.tensor([[True, True], [False, False], [True, True], [True, False]])
    shares = shares_of(BATCH, ShareRule(floor=0.0), kept)
    torch.testing.assert_close(shares.values, torch.tensor([[1.0, 1.0], [1.0, 0.0], [1.5, 1.0], [0.5, 1.0]]))
    assert shares.count.tolist() == [2, 0, 2, 1]


@pytest.mark.parametrize("axis", ["position", "matrix", "response"])
@pytest.mark.parametrize("is_geometric", [False, True])
def test_the_size_of_chunks_changes_no_bit(axis: str, is_geometric: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = random_batch(5, num_groups=4, group_size=6, max_tokens=9)
    rule = ShareRule(axis=axis, is_geometric=is_geometric)
    kept = torch.rand(batch.arguments()["token_entropy"].shape, generator=torch.Generator().manual_seed(0)) < 0.7
    whole = [shares_of(batch, rule, mask).values for mask in (None, kept)]
    monkeypatch.setitem(rows_module._BLOCK_ELEMENTS, "cpu", 2)
    pieces = [shares_of(batch, rule, mask).values for mask in (None, kept)]
    for left, right in zip(whole, pieces, strict=True):
        assert torch.equal(left, right)
