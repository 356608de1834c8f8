"""The loss of supervised fine-tuning: the negative log-likelihood of given tokens."""

import torch
from torch import Tensor


def nll_sum(logprobs: Tensor) -> Tensor:
    """``-sum_t log pi(o_t | o_<t)``: the loss is this over all ranks and micro-batches, by the number of tokens.

    Args:
        logprobs: ``[R]`` float32 or float64, nats, of the tokens that are trained; gradient flows.

    Returns:
        Scalar in the dtype of ``logprobs``. Without tokens it is 0, which still runs backward.
    """
    return -logprobs.sum()


def nll_statistic(logprobs: Tensor) -> Tensor:
    """The same for a report, scalar float64 without gradient."""
    return -logprobs.detach().sum(dtype=torch.float64)
