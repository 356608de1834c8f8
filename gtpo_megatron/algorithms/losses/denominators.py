"""Denominators of losses, as one weight per row, so that a batch can be split into micro-batches anywhere."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Denominator:
    """The unit of the denominator.

    Attributes:
        unit: ``batch``: each token (each response, for a loss of responses); ``response``: each response, so that its
            tokens are averaged; ``group``: each group, so that its tokens (responses) are averaged.
        tokens_per_response: number of tokens that every response with tokens counts as, whatever its length (Dr.GRPO);
            None: its own tokens.
    """

    unit: Literal["batch", "response", "group"] = "batch"
    tokens_per_response: int | None = None

    def row_weights(self, lengths: Tensor, group_index: Tensor | None, *, per_response: bool) -> Tensor:
        """The weight of each token of a row, or of the row itself for a loss of responses.

        ``batch``: 1. ``response``: ``1 / |o|`` per token. ``group``: 1 over the tokens (responses) of its group.
        The loss is ``sum(weight * loss) / total(weights)``.

        Args:
            lengths: ``[B]`` int64; the rows must hold whole groups for ``group``.
            group_index: ``[B]`` int64 in [0, N); needed for ``group``.
            per_response: one loss per response.

        Returns:
            ``[B]`` float64; 0 for rows without tokens.
        """
        live = (lengths > 0).to(torch.float64)
        units = live if per_response else lengths.to(torch.float64)
        if self.unit == "group" and group_index is not None:
            num_groups = int(group_index.max()) + 1 if len(group_index) else 0
            total = torch.zeros(num_groups, dtype=torch.float64, device=lengths.device)
            return live / total.index_add_(0, group_index, units)[group_index].clamp(min=1)
        if self.unit == "response" and not per_response:
            return live / units.clamp(min=1)
        return live

    def total(self, row_weights: Tensor, lengths: Tensor, *, per_response: bool) -> Tensor:
        """Sum that the rows add to the denominator, a float64 scalar.

        Args:
            row_weights: ``[B]`` float64, the result of ``row_weights``.
            lengths: ``[B]`` int64.
            per_response: one loss per response.
        """
        if self.tokens_per_response is not None:
            return (lengths > 0).sum().to(torch.float64) * self.tokens_per_response
        return (row_weights * ((lengths > 0) if per_response else lengths)).sum()

    def of_batch(self, lengths: Tensor, group_index: Tensor, *, per_response: bool) -> Tensor:
        """The denominator of a whole batch, a float64 scalar: a count, so the order of rows changes no bit.

        Args:
            lengths: ``[R]`` int64.
            group_index: ``[R]`` int64.
            per_response: one loss per response.
        """
        live = lengths > 0
        if self.tokens_per_response is not None:
            count = self.tokens_per_response * int(live.sum())
        elif self.unit == "group":
            count = len(torch.unique(group_index[live]))
        elif self.unit == "response" or per_response:
            count = int(live.sum())
        else:
            count = int(lengths.sum())
        return torch.tensor(count, dtype=torch.float64)
