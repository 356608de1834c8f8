"""The batch at a glance: a few numbers of every response, the same on every rank.

Lengths, rewards and labels give all counts (d_t, h_t, pool sizes); the extremes of each row give the grids of exact
sums.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gtpo_megatron.algorithms.outcome import is_correct
from gtpo_megatron.algorithms.reduction import Reduction
from gtpo_megatron.algorithms.rows import RowFacts

_NUM_COLUMNS = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponseTable:
    """All ``R`` responses of the batch, on the CPU.

    Attributes:
        group_index: ``[R]`` int64 in [0, num_groups), in ascending order of the labels.
        num_groups: prompt groups, those without any token included.
        rewards: ``[R]`` float64, raw outcome rewards.
        is_correct: ``[R]`` bool: the raw reward reaches the threshold and the response has tokens.
        lengths: ``[R]`` int64.
        is_live: ``[R]`` bool, the response has tokens.
        lowest: ``[R]`` float64, smallest weight of the response.
        highest: ``[R]`` float64, largest one.
        mean: ``[R]`` float64, mean weight of the response; what it is exactly, its writer says.
        owners: ``[R]`` int64, the rank that holds the response.
        rank: this one.
    """

    group_index: Tensor
    num_groups: int
    rewards: Tensor
    is_correct: Tensor
    lengths: Tensor
    is_live: Tensor
    lowest: Tensor
    highest: Tensor
    mean: Tensor
    owners: Tensor
    rank: int

    @property
    def mine(self) -> Tensor:
        """``[B]`` int64: where this rank's rows stand, in their order."""
        return torch.nonzero(self.owners == self.rank).flatten()

    @property
    def is_one_sided(self) -> Tensor:
        """``[num_groups]`` bool: no correct response, or no wrong one, by raw reward."""
        correct, wrong = self.counts_by_side()
        return (correct == 0) | (wrong == 0)

    def counts_by_side(self) -> tuple[Tensor, Tensor]:
        """``n`` and ``m`` of every group: correct and wrong responses with tokens, each ``[num_groups]`` int64."""
        correct = torch.bincount(self.group_index[self.is_correct], minlength=self.num_groups)
        wrong = torch.bincount(self.group_index[self.is_live & ~self.is_correct], minlength=self.num_groups)
        return correct, wrong


def gather_table(
    read_rows: Callable[[], tuple[Tensor, Tensor, RowFacts, Tensor]],
    *,
    success_threshold: float,
    reduction: Reduction,
    signature: str,
) -> ResponseTable:
    """Builds the table from every rank's rows.

    Args:
        read_rows: validates this rank's inputs and returns rewards ``[B]``, group labels ``[B]``, row facts and the
            mean weights ``[B]``.
        success_threshold: a response is correct where its reward is at least this.
        reduction: the ranks.
        signature: what all ranks must agree on.

    Raises:
        GTPOError: what ``read_rows`` raised on any rank, on all of them.
    """

    def encode() -> Tensor:
        rewards, group_ids, facts, mean = read_rows()
        floats = torch.stack((rewards.to(torch.float64).cpu(), facts.lowest, facts.highest, mean.cpu()), dim=1)
        # decided here, where the rewards' precision is known; it travels in the last bit of the length
        outcome = is_correct(rewards, success_threshold=success_threshold).cpu()
        integers = torch.stack((group_ids.to(torch.int64).cpu(), 2 * facts.lengths + outcome), dim=1)
        return torch.cat((integers, floats.contiguous().view(torch.int64)), dim=1)

    gathered = reduction.gather_rows(encode, signature)
    table = gathered.table.reshape(-1, _NUM_COLUMNS)
    floats = table[:, 2:].contiguous().view(torch.float64)
    labels, group_index = torch.unique(table[:, 0], return_inverse=True)
    lengths, outcome = table[:, 1] // 2, table[:, 1] % 2 == 1
    is_live = lengths > 0
    return ResponseTable(
        group_index=group_index,
        num_groups=len(labels),
        rewards=floats[:, 0],
        is_correct=is_live & outcome,
        lengths=lengths,
        is_live=is_live,
        lowest=floats[:, 1],
        highest=floats[:, 2],
        mean=floats[:, 3],
        owners=gathered.owners,
        rank=gathered.rank,
    )
