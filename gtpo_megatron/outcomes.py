"""What a reward says of a response, and of its group: whether it is correct, whether the group can teach anything."""

import math

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
    rewards: Tensor,
    group_ids: Tensor,
    *,
    success_threshold: float = 0.5,
    is_usable: Tensor | None = None,
    min_spread: float | None = None,
    mean_between: tuple[float, float] = (-math.inf, math.inf),
) -> tuple[Tensor, Tensor]:
    """Groups that can teach something, which dynamic sampling keeps.

    Usually those with ``0 < n < G`` correct responses by raw outcome (2503.14476, Eq. 11); with a spread those whose
    largest raw reward exceeds their smallest by as much. Of either kind those whose mean raw reward lies in a band.

    Args:
        rewards: ``[B]`` raw outcome rewards.
        group_ids: ``[B]`` integer labels.
        success_threshold: a response is correct if its reward is at least this.
        is_usable: ``[B]`` bool; False for responses without a verdict or without tokens, which are not counted.
        min_spread: least difference of rewards that is a signal, whatever is correct; None goes by what is correct.
        mean_between: least and largest mean reward of a group.

    Returns:
        ``[N]`` int64 labels in ascending order, and ``[N]`` bool: whether the group is informative.
    """
    labels, index = torch.unique(group_ids, return_inverse=True)
    usable = torch.ones_like(index, dtype=torch.bool) if is_usable is None else is_usable
    of_group, values = index[usable], rewards[usable].to(torch.float64)
    count = torch.bincount(of_group, minlength=len(labels))
    if min_spread is None:
        right = is_correct(rewards, success_threshold=success_threshold)[usable]
        correct = torch.bincount(of_group[right], minlength=len(labels))
        has_signal = (correct > 0) & (correct < count)
    else:
        ends = [
            values.new_full((len(labels),), start).scatter_reduce(0, of_group, values, reduce)
            for start, reduce in ((-math.inf, "amax"), (math.inf, "amin"))
        ]
        has_signal = (ends[0] - ends[1] >= min_spread) & (count > 0)
    mean = torch.zeros(len(labels), dtype=torch.float64).index_add(0, of_group, values) / count
    return labels, has_signal & (mean >= mean_between[0]) & (mean <= mean_between[1])


def solved_counts(
    rewards: Tensor, group_ids: Tensor, *, success_threshold: float, is_usable: Tensor
) -> dict[int, tuple[int, int]]:
    """By group: correct responses, and those that count; a group without any is left out."""
    right = is_usable & is_correct(rewards, success_threshold=success_threshold)
    found: dict[int, tuple[int, int]] = {}
    for label, counts, solved in zip(group_ids.tolist(), is_usable.tolist(), right.tolist(), strict=True):
        if counts:
            correct, counted = found.get(label, (0, 0))
            found[label] = correct + solved, counted + 1
    return found
