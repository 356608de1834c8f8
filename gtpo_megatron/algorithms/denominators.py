"""What losses are divided by, as one weight a row, so that a batch can be cut into micro-batches and ranks anywhere."""

from typing import Literal, TypeAlias

import torch
from torch import Tensor

Denominator: TypeAlias = Literal["batch", "response", "group"]


def row_weights(
    denominator: Denominator, lengths: Tensor, group_index: Tensor | None, *, is_sequence_level: bool
) -> Tensor:
    """The weight of each token of a row; at sequence level, of the row.

    ``batch``: 1. ``response``: ``1 / |o|`` a token, so that a response weighs 1. ``group``: one over the tokens
    (responses) of the row's group, so that a group weighs 1. The loss is ``sum(weight * loss) / sum(weight)``.

    Args:
        denominator: what makes one unit.
        lengths: ``[B]`` int64; the rows must hold whole groups for ``group``.
        group_index: ``[B]`` int64 in [0, N); needed for ``group``.
        is_sequence_level: one loss a response.

    Returns:
        ``[B]`` float64; 0 for rows without tokens.
    """
    live = (lengths > 0).to(torch.float64)
    units = lengths.to(torch.float64) if not is_sequence_level else live
    if denominator == "group" and group_index is not None:
        num_groups = int(group_index.max()) + 1 if len(group_index) else 0
        total = torch.zeros(num_groups, dtype=torch.float64, device=lengths.device)
        return live / total.index_add_(0, group_index, units)[group_index].clamp(min=1)
    if denominator == "response" and not is_sequence_level:
        return live / units.clamp(min=1)
    return live
