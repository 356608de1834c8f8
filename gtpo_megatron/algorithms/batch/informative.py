"""Which groups can teach: what dynamic sampling keeps (DAPO, arXiv 2503.14476, Eq. 11)."""

import torch
from torch import Tensor

from gtpo_megatron.algorithms.batch.outcome import is_correct


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
    succeeded = is_correct(rewards, success_threshold=success_threshold)
    correct = torch.bincount(index[usable & succeeded], minlength=len(labels))
    wrong = torch.bincount(index[usable & ~succeeded], minlength=len(labels))
    return labels, (correct > 0) & (wrong > 0)
