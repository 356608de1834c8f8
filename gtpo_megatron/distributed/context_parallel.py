"""Gathers per-token values over the context-parallel ranks, in response order."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def gather_tokens(values: Tensor, places: Tensor, *, num_tokens: int, cp_group: dist.ProcessGroup | None) -> Tensor:
    """Gathers every token's values on every rank.

    Backward returns to each rank the gradient of its own tokens, without a sum over ranks: all ranks compute the same
    loss from the same values, and the data-parallel reduction of the weights' gradients counts every token once.

    Args:
        values: ``[..., r]``, values of the tokens that this rank holds.
        places: ``[r]`` int64, their indices among ``num_tokens``. Every token is held by exactly one rank.
        num_tokens: number of tokens of all ranks.
        cp_group: None: this rank holds all tokens in order.

    Returns:
        ``[..., num_tokens]``, equal bit for bit on all ranks; differentiable.

    Collectives: one all-reduce over cp forward (a token's value plus zeros is exact), none backward.
    """
    if cp_group is None:
        return values
    whole = values.new_zeros(*values.shape[:-1], num_tokens)
    whole = whole.index_copy(-1, places.to(values.device, non_blocking=True), values)
    total: Tensor = _SumOverRanks.apply(whole, cp_group)  # type: ignore[no-untyped-call]
    return total


class _SumOverRanks(torch.autograd.Function):
    """All-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        del ctx
        total = values.detach().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        del ctx
        return grads[0], None
