"""Which responses are correct: the one place where training compares a reward with the threshold.

What reads rewards from files compares by ``observability.correctness``, which agrees.
"""

import torch
from torch import Tensor


def is_correct(rewards: Tensor, *, success_threshold: float) -> Tensor:
    """``r_i >= threshold``, membership of O+ by raw outcome, in the rewards' own precision.

    A reward of 0.7 that is kept as float32 is less than the float64 number 0.7; a threshold of 0.7 means the same
    number to both, so it is rounded as the rewards were.

    Args:
        rewards: any shape, any real dtype; compared as float64 where it is no floating-point one.
        success_threshold: least reward of a correct response.

    Returns:
        Bool of the same shape.
    """
    if not rewards.is_floating_point():
        rewards = rewards.to(torch.float64)
    return rewards >= torch.tensor(success_threshold, dtype=rewards.dtype, device=rewards.device)
