"""Parts of a batch for tests of single modules."""

import torch
from torch import Tensor

from gtpo_megatron.algorithms.sums import Reduction
from gtpo_megatron.algorithms.token_batch import ResponseTable, Tokens, gather_table


def table_of(rewards: list[float], labels: list[int], lengths: list[int], *, threshold: float = 0.5) -> ResponseTable:
    """The table of a batch that is all here."""
    return gather_table(
        lambda: (torch.tensor(rewards), torch.tensor(labels), torch.tensor(lengths)),
        success_threshold=threshold,
        reduction=Reduction(),
        signature="",
    )


def tokens_of(lengths: list[int]) -> Tokens:
    """Left-aligned tokens."""
    width = max(lengths, default=0)
    return Tokens.of(torch.arange(width) < torch.tensor(lengths).reshape(-1, 1))


def column(*values: float) -> Tensor:
    """``[N]`` float64."""
    return torch.tensor(values, dtype=torch.float64)
