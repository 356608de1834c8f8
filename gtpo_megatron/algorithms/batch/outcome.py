"""Compares rewards with the success threshold, for training; ``observability.correctness`` is the same for files."""

import torch
from torch import Tensor


def is_correct(rewards: Tensor, *, success_threshold: float) -> Tensor:
    """``r_i >= threshold``: membership of O+ by raw outcome, compared in the dtype of the rewards.

    The threshold is rounded to that dtype: a reward of 0.7 stored as float32 is less than the float64 number 0.7.

    Args:
        rewards: any shape, any real dtype; integers and bools are compared as float64.
        success_threshold: lowest reward of a correct response.

    Returns:
        Bool of the same shape.
    """
    if not rewards.is_floating_point():
        rewards = rewards.to(torch.float64)
    return rewards >= torch.tensor(success_threshold, dtype=rewards.dtype, device=rewards.device)
