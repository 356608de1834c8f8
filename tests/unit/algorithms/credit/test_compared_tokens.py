"""Keys and counts of every axis and scope against loops, with masks, on one rank and on several."""

import random

import pytest
import torch
from torch import Tensor

from gtpo_megatron.algorithms.batch.reduction import LocalReduction, Reduction
from gtpo_megatron.algorithms.batch.response_table import gather_table
from gtpo_megatron.algorithms.batch.tokens import Tokens
from gtpo_megatron.algorithms.credit.credit_batch import CreditBatch
from gtpo_megatron.algorithms.credit.gtpo import compared_tokens
from gtpo_megatron.config.algorithm import GTPOConfig
from tests.faked_ranks import World

AXES = ["position", "response", "matrix"]


class Responses:
    """A few responses with holes in their masks, and tokens that take part in no comparison."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.count = draw.randint(0, 9)
        everyone = range(self.count)
        self.rewards = [float(draw.random() < 0.6) for _ in everyone]
        self.groups = [draw.choice([4, -1, 9]) for _ in everyone]
        self.masks = [[draw.random() < draw.choice([0.0, 0.5, 1.0]) for _ in range(7)] for _ in everyone]
        self.lengths = [sum(mask) for mask in self.masks]
        self.kept = [[draw.random() < 0.6 for _ in range(n)] for n in self.lengths]
        self.owners = [draw.choice([0, 1, 1, 3]) for _ in everyone]

    def peers(self, i: int, t: int, axis: str, *, spans_batch: bool) -> set[tuple[int, int]]:
        """The tokens that token ``t`` of response ``i`` is compared with, itself among them."""
        found = set()
        for k in range(self.count):
            is_same_set = self.rewards[k] == self.rewards[i] and (spans_batch or self.groups[k] == self.groups[i])
            for u in range(self.lengths[k]):
                is_peer = {"position": is_same_set and u == t, "response": k == i, "matrix": is_same_set}[axis]
                if is_peer:
                    found.add((k, u))
        return found

    def compare(
        self, rows: list[int], axis: str, *, spans_batch: bool, masked: bool, reduction: Reduction
    ) -> tuple[Tensor, Tensor]:
        tokens = Tokens.of(torch.tensor([self.masks[i] for i in rows], dtype=torch.bool).reshape(len(rows), 7))
        table = gather_table(
            lambda: (
                torch.tensor([self.rewards[i] for i in rows]),
                torch.tensor([self.groups[i] for i in rows], dtype=torch.int64),
                tokens.lengths,
            ),
            success_threshold=0.5,
            reduction=reduction,
            signature="",
        )
        compared = torch.tensor([one for i in rows for one in self.kept[i]], dtype=torch.bool) if masked else None
        batch = CreditBatch(
            tokens=tokens,
            entropy=torch.zeros(len(tokens.row), dtype=torch.float64),
            compared=compared,
            table=table,
            penalties=torch.zeros(len(table.lengths), dtype=torch.float64),
            reduction=reduction,
        )
        return compared_tokens(GTPOConfig(entropy_axis=axis, entropy_scope="batch" if spans_batch else "group"), batch)

    def check(
        self, rows: list[int], found: tuple[Tensor, Tensor], axis: str, *, spans_batch: bool, masked: bool
    ) -> None:
        tokens = [(i, t) for i in rows for t in range(self.lengths[i])]
        keys, counts = found[0].tolist(), found[1].tolist()
        assert len(keys) == len(tokens)
        peers = [self.peers(i, t, axis, spans_batch=spans_batch) for i, t in tokens]
        for one, own in enumerate(tokens):
            for other, own_too in enumerate(tokens):
                assert (keys[one] == keys[other]) == (own_too in peers[one]), (own, own_too)
            kept = [self.kept[k][u] for k, u in peers[one]] if masked else [True] * len(peers[one])
            assert counts[keys[one]] == sum(kept), own


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("spans_batch", [False, True])
@pytest.mark.parametrize("axis", AXES)
def test_keys_and_counts_are_those_of_the_loops(axis: str, spans_batch: bool, masked: bool) -> None:
    for seed in range(40):
        batch = Responses(seed)
        everyone = list(range(batch.count))
        found = batch.compare(everyone, axis, spans_batch=spans_batch, masked=masked, reduction=LocalReduction())
        batch.check(everyone, found, axis, spans_batch=spans_batch, masked=masked)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("spans_batch", [False, True])
@pytest.mark.parametrize("axis", AXES)
def test_every_rank_counts_the_whole_batch(axis: str, spans_batch: bool, masked: bool) -> None:
    """Ranks hold responses of different lengths of the same set, and rank 2 holds nothing."""
    for seed in range(40):
        batch = Responses(seed)
        rows = [[i for i in range(batch.count) if batch.owners[i] == rank] for rank in range(4)]

        def part(reduction, batch=batch, rows=rows):
            found = batch.compare(
                rows[reduction.rank], axis, spans_batch=spans_batch, masked=masked, reduction=reduction
            )
            # what is added over a key is added over all of its tokens
            key, count = found
            return found, reduction.sum(torch.bincount(key, minlength=len(count)))

        for rank, (found, totals) in enumerate(World(4).run(part)):
            batch.check(rows[rank], found, axis, spans_batch=spans_batch, masked=masked)
            if not masked:
                assert totals.tolist() == found[1].tolist()
