"""The groups that dynamic sampling keeps (DAPO, arXiv 2503.14476, Eq. 11)."""

import torch
from torch import Tensor

from gtpo_megatron.algorithms.token_batch import is_correct


def informative_groups(
    rewards: Tensor, group_ids: Tensor, *, success_threshold: float = 0.5, is_usable: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Groups with ``0 < n < G`` correct responses by raw outcome.

    Args:
        rewards: ``[B]`` raw outcome rewards.
        group_ids: ``[B]`` integer labels.
        success_threshold: a response is correct if its reward is at least this.
        is_usable: ``[B]`` bool; False for responses without a verdict or without tokens, which are not counted.

    Returns:
        ``[N]`` int64 labels in ascending order, and ``[N]`` bool: whether the group is informative.
    """
    labels, index = torch.unique(group_ids, return_inverse=True)
    usable = torch.ones_like(index, dtype=torch.bool) if is_usable is None else is_usable
    succeeded = is_correct(rewards, success_threshold=success_threshold)
    correct = torch.bincount(index[usable & succeeded], minlength=len(labels))
    incorrect = torch.bincount(index[usable & ~succeeded], minlength=len(labels))
    return labels, (correct > 0) & (incorrect > 0)
