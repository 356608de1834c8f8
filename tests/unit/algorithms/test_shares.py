"""Shares by hand, and segments too large for one chunk."""

import pytest
import torch
from gtpo_megatron.algorithms.rows import row_facts
from gtpo_megatron.algorithms.share_grid import ShareRule, TokenWeights
from gtpo_megatron.algorithms.shares import Shares, entropy_shares
from gtpo_megatron.algorithms.table import gather_table

from gtpo_megatron.algorithms import rows as rows_module
from gtpo_megatron.algorithms.batch.reduction import LocalReduction
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
    mask = BATCH.arguments()["response_mask"]
    torch.testing.assert_close(1 + shares.values[mask], torch.tensor(wanted)[mask])
    assert shares.highest.tolist() == pytest.approx([max(1.0, *row) for row in wanted])  # 1 is always between
    assert shares.lowest.tolist() == pytest.approx([min(1.0, *(v for v in row if v)) for row in wanted])
    assert shares.origin.tolist() == [1, 1, 1, 1]
    assert shares.total.tolist() == pytest.approx([sum(v - 1 for v in row if v) for row in wanted], abs=1e-12)
    assert shares.total_square.tolist() == pytest.approx([sum((v - 1) ** 2 for v in row if v) for row in wanted])
    assert shares.count.tolist() == [2, 1, 2, 2]


def test_plain_sums_where_pools_are_wide() -> None:
    shares = shares_of(BATCH, ShareRule(floor=0.0, may_be_narrow=False))
    assert shares.origin.tolist() == [0, 0, 0, 0]
    assert shares.lowest.tolist() == [0, 0, 0, 0]
    torch.testing.assert_close(shares.values[2], torch.tensor([1.5, 0.4]))
    assert shares.total.tolist() == pytest.approx([1.5, 1.5, 1.9, 2.1], abs=1e-12)
    assert shares.total_square.tolist() == pytest.approx([1.25, 2.25, 2.41, 2.81], abs=1e-12)


def test_excluded_tokens_have_share_one() -> None:
    kept = torch.tensor([[True, True], [False, False], [True, True], [True, False]])
    shares = shares_of(BATCH, ShareRule(floor=0.0), kept)
    mask = BATCH.arguments()["response_mask"]
    wanted = torch.tensor([[1.0, 1.0], [1.0, 0.0], [1.5, 1.0], [0.5, 1.0]])
    torch.testing.assert_close(1 + shares.values[mask], wanted[mask])
    assert shares.total.tolist() == pytest.approx([0, 0, 0.5, -0.5], abs=1e-12)
    assert shares.count.tolist() == [2, 0, 2, 1]


@pytest.mark.parametrize("axis", ["position", "matrix", "response"])
@pytest.mark.parametrize("is_geometric", [False, True])
@pytest.mark.parametrize("floor", [1e-8, 1e-15])
def test_the_size_of_chunks_changes_no_bit(
    axis: str, is_geometric: bool, floor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = random_batch(5, num_groups=4, group_size=6, max_tokens=9)
    rule = ShareRule(axis=axis, is_geometric=is_geometric, floor=floor)
    kept = torch.rand(batch.arguments()["token_entropy"].shape, generator=torch.Generator().manual_seed(0)) < 0.7
    live = batch.arguments()["response_mask"]
    whole = [shares_of(batch, rule, mask) for mask in (None, kept)]
    monkeypatch.setitem(rows_module._BLOCK_ELEMENTS, "cpu", 2)
    pieces = [shares_of(batch, rule, mask) for mask in (None, kept)]
    for left, right in zip(whole, pieces, strict=True):
        assert torch.equal(left.values[live], right.values[live])
        for name in ("lowest", "highest", "count", "total", "total_square"):
            assert torch.equal(getattr(left, name), getattr(right, name)), name
