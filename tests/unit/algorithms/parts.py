"""Parts of credit by hand: a batch that is all here."""

import torch
from torch import Tensor

from gtpo_megatron.algorithms.token_batch import CreditBatch, ResponseTable, table_rows


def table_of(rewards: list[float], labels: list[int], lengths: list[int], *, threshold: float = 0.5) -> ResponseTable:
    """The table of a batch that is all here."""
    labels, lengths = (torch.tensor(column, dtype=torch.int64) for column in (labels, lengths))
    rows = table_rows(torch.tensor(rewards), labels, lengths, success_threshold=threshold)
    return ResponseTable.of(rows, slice(0, len(rows)))


def batch_of(
    mask: Tensor | list[int], entropies: list[float], *, rewards: list[float] | None = None, **rest: object
) -> CreditBatch:
    """A batch of one group that is all here.

    Args:
        mask: ``[B, T]`` bool; or lengths of left-aligned responses.
        entropies: of the tokens.
        rewards: of the responses; all 0 by default.
        rest: further fields.
    """
    if isinstance(mask, list):
        mask = torch.arange(max(mask, default=0)) < torch.tensor(mask).reshape(-1, 1)
    table = table_of(rewards or [0.0] * len(mask), [0] * len(mask), mask.sum(1).tolist())
    return CreditBatch.of(mask, table, entropy=column(*entropies), **rest)


def column(*values: float) -> Tensor:
    """``[N]`` float64."""
    return torch.tensor(values, dtype=torch.float64)
