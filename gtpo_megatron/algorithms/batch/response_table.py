"""A table of length, reward and group of every response of the batch, the same on every rank.

It gives every count that the formulas need: ``d_t``, ``h_t``, ``n``, ``m`` and the pool sizes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gtpo_megatron.algorithms.batch.outcome import is_correct
from gtpo_megatron.algorithms.batch.reduction import Reduction

_NUM_COLUMNS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponseTable:
    """All ``R`` responses of the batch, on the CPU.

    Attributes:
        group_index: ``[R]`` int64 in [0, num_groups), in ascending order of the labels.
        num_groups: number of prompt groups, including those without any token.
        rewards: ``[R]`` float64, raw outcome rewards.
        is_correct: ``[R]`` bool: the raw reward reaches the threshold and the response has tokens.
        lengths: ``[R]`` int64, the policy's own tokens.
        is_live: ``[R]`` bool: the response has tokens.
        mine: this rank's rows of the table.
    """

    group_index: Tensor
    num_groups: int
    rewards: Tensor
    is_correct: Tensor
    lengths: Tensor
    is_live: Tensor
    mine: slice

    @property
    def is_one_sided(self) -> Tensor:
        """``[num_groups]`` bool: the group has no correct or no incorrect response, by raw reward."""
        sides = torch.zeros(self.num_groups, 2, dtype=torch.bool)
        sides[self.group_index[self.is_live], self.is_correct[self.is_live].to(torch.int64)] = True
        return ~sides.all(1)

    def scope(self, *, spans_batch: bool) -> Tensor:
        """``[R]`` int64: the group of each response, or 0 for all if ``spans_batch``."""
        return torch.zeros_like(self.group_index) if spans_batch else self.group_index

    def num_scopes(self, *, spans_batch: bool) -> int:
        """Number of scopes: the groups, or 1 if ``spans_batch``."""
        return 1 if spans_batch else self.num_groups

    def sides(self, *, spans_batch: bool) -> Tensor:
        """``[R]`` int64: the side of each response; O+ of scope ``s`` is ``2 s + 1``, O- is ``2 s``."""
        return 2 * self.scope(spans_batch=spans_batch) + self.is_correct


def gather_table(
    read_rows: Callable[[], tuple[Tensor, Tensor, Tensor]],
    *,
    success_threshold: float,
    reduction: Reduction,
    signature: str,
) -> ResponseTable:
    """Builds the table from every rank's responses.

    Args:
        read_rows: validates this rank's inputs and returns rewards, labels and lengths, each ``[B]``.
        success_threshold: a response is correct if its reward is at least this.
        reduction: the ranks.
        signature: text that must be equal on all ranks.

    Raises:
        GTPOError: ``read_rows`` raised it on some rank; it is raised on all of them.
    """

    def encode() -> Tensor:
        rewards, group_ids, lengths = read_rows()
        # decided here because the dtype of the rewards is known; sent in the last bit of the length
        outcome = is_correct(rewards, success_threshold=success_threshold).cpu()
        bits = rewards.to(torch.float64).cpu().contiguous().view(torch.int64)
        return torch.stack((group_ids.to(torch.int64).cpu(), 2 * lengths.cpu() + outcome, bits), dim=1)

    rows, mine = reduction.gather_rows(encode, signature)
    labels, coded, bits = rows.reshape(-1, _NUM_COLUMNS).unbind(1)
    distinct, group_index = torch.unique(labels, return_inverse=True)
    lengths = coded // 2
    return ResponseTable(
        group_index=group_index,
        num_groups=len(distinct),
        rewards=bits.contiguous().view(torch.float64),
        is_correct=(coded % 2 == 1) & (lengths > 0),
        lengths=lengths,
        is_live=lengths > 0,
        mine=mine,
    )
