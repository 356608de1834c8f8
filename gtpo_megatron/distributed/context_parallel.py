"""What the ranks that share a sequence's tokens tell one another: each token's scores, in response order."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def gather_tokens(values: Tensor, places: Tensor, *, num_tokens: int, cp_group: dist.ProcessGroup | None) -> Tensor:
    """Every token's values on every rank.

    Backward hands each rank the gradient of the tokens it gave, unsummed: all ranks compute the same loss from the same
    gathered values, so each has the whole gradient of its own tokens, and the sum over ranks that data parallelism
    makes of the weights' gradients counts every token once.

    Args:
        values: ``[..., r]``, of the tokens this rank holds.
        places: ``[r]`` int64, which of the ``num_tokens`` they are. Over all ranks every token is held once.
        num_tokens: of all ranks.
        cp_group: None: one rank, which holds all tokens in order.

    Returns:
        ``[..., num_tokens]``, equal to the last bit on all ranks; differentiable.

    Collectives: one all-reduce over cp forward (a token's value plus zeros is exact), none backward.
    """
    if cp_group is None:
        return values
    whole = values.new_zeros(*values.shape[:-1], num_tokens)
    whole = whole.index_copy(-1, places.to(values.device), values)
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
