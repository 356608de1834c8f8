"""Which groups can teach: what dynamic sampling keeps (DAPO, arXiv 2503.14476, Eq. 11)."""

import torch
from torch import Tensor


def informative_groups(
    rewards: Tensor, group_ids: Tensor, *, success_threshold: float = 0.5, is_usable: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``0 < n < G`` by raw outcome: groups neither all correct nor all wrong.

    Args:
        rewards: ``[B]`` raw outcome rewards.
        group_ids: ``[B]`` integer labels.
        success_threshold: a response is correct where its reward is at least this.
        is_usable: ``[B]`` bool; responses without a verdict or without tokens count on neither side.

    Returns:
        ``[N]`` int64 labels in ascending order, and ``[N]`` bool: whether the group is informative.
    """
    labels, index = torch.unique(group_ids, return_inverse=True)
    usable = torch.ones_like(index, dtype=torch.bool) if is_usable is None else is_usable
    is_correct = rewards.to(torch.float64) >= success_threshold
    correct = torch.bincount(index[usable & is_correct], minlength=len(labels))
    wrong = torch.bincount(index[usable & ~is_correct], minlength=len(labels))
    return labels, (correct > 0) & (wrong > 0)
