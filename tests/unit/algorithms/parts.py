"""Parts of a batch for tests of single modules."""

import torch
from torch import Tensor

from gtpo_megatron.algorithms.batch.reduction import LocalReduction
from gtpo_megatron.algorithms.batch.response_table import ResponseTable, gather_table
from gtpo_megatron.algorithms.batch.tokens import Tokens
from gtpo_megatron.algorithms.credit.comparison import Comparison


def table_of(rewards: list[float], labels: list[int], lengths: list[int], *, threshold: float = 0.5) -> ResponseTable:
    """The table of a batch that is all here."""
    return gather_table(
        lambda: (torch.tensor(rewards), torch.tensor(labels), torch.tensor(lengths)),
        success_threshold=threshold,
        reduction=LocalReduction(),
        signature="",
    )


def tokens_of(lengths: list[int]) -> Tokens:
    """Left-aligned tokens."""
    width = max(lengths, default=0)
    return Tokens.of(torch.arange(width) < torch.tensor(lengths).reshape(-1, 1))


def comparison_of(key: list[int], num_keys: int | None = None) -> Comparison:
    """One that nobody else takes part in."""
    keys = torch.tensor(key, dtype=torch.int64)
    size = num_keys if num_keys is not None else max(key, default=-1) + 1
    return Comparison(key=keys, count=torch.bincount(keys, minlength=size), reduction=LocalReduction())


def column(*values: float) -> Tensor:
    """``[N]`` float64."""
    return torch.tensor(values, dtype=torch.float64)
