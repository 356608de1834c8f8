"""What a reward says of a response, and of its group: whether it is correct, whether the group can teach anything."""

import torch
from torch import Tensor


def is_correct(rewards: Tensor, *, success_threshold: float) -> Tensor:
    """``r_i >= threshold``: membership of O+ by raw outcome, compared in the dtype of the rewards.

    The threshold is rounded to that dtype: a reward of 0.7 stored as float32 is less than the float64 number 0.7.
    ``companions.evaluate.scores.are_correct`` is the same for rewards from files.

    Args:
        rewards: any shape, any real dtype; integers and bools are compared as float64.
        success_threshold: lowest reward of a correct response.

    Returns:
        Bool of the same shape.
    """
    if not rewards.is_floating_point():
        rewards = rewards.to(torch.float64)
    return rewards >= torch.tensor(success_threshold, dtype=rewards.dtype, device=rewards.device)


def informative_groups(
    rewards: Tensor, group_ids: Tensor, *, success_threshold: float = 0.5, is_usable: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Groups with ``0 < n < G`` correct responses by raw outcome, which dynamic sampling keeps (2503.14476, Eq. 11).

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
