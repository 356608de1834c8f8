"""Context-parallel ranks exchange tokens for heads, so that each has whole sequences, of its share of the heads."""

import math
from collections.abc import Sequence

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import all_to_all
from torch import Tensor

from gtpo_megatron.data.packing import held_positions


class HeadExchange:
    """Both ways of the exchange for one micro-batch; with one rank nothing is done.

    Args:
        bounds: where whole sequences start, and the packed length ``P``.
        heads: heads that every rank has of its own tokens; a multiple of the context-parallel size.
    """

    def __init__(self, bounds: Sequence[int], heads: int) -> None:
        self._size, self._heads = parallel_state.get_context_parallel_world_size(), heads
        if self._size > 1:
            self._group = parallel_state.get_context_parallel_group()
            held = [held_positions(bounds, self._size, rank) for rank in range(self._size)]
            self._order = torch.cat(held)

    @property
    def _index(self) -> int:
        return parallel_state.get_context_parallel_rank() if self._size > 1 else 0

    def whole(self, *held: Tensor) -> tuple[Tensor, ...]:
        """``[p, heads times n, ...]`` of this rank's tokens, of one dtype, to ``[P, heads times n / cp, ...]``.

        Collectives: one all-to-all over cp, and in backward another.
        """
        if self._size == 1:
            return held
        parts = [one.reshape(len(one), self._heads, -1) for one in held]
        tokens = torch.cat(parts, dim=-1)
        by_rank = torch.unflatten(tokens, 1, (self._size, -1)).transpose(0, 1).flatten(0, 1).contiguous()
        found = all_to_all(self._group, by_rank).index_select(0, self._order.argsort().to(tokens.device))
        shares = found.split([part.shape[-1] for part in parts], dim=-1)
        return tuple(
            share.reshape(len(found), one.shape[1] // self._size, *one.shape[2:])
            for share, one in zip(shares, held, strict=True)
        )

    def held(self, whole: Tensor) -> Tensor:
        """``[P, heads times n / cp, ...]`` back to ``[p, heads times n, ...]``.

        Collectives: one all-to-all over cp, and in backward another.
        """
        if self._size == 1:
            return whole
        by_rank = whole.index_select(0, self._order.to(whole.device)).contiguous()
        found = torch.unflatten(all_to_all(self._group, by_rank), 0, (self._size, -1)).transpose(0, 1)
        return found.reshape(len(whole) // self._size, math.prod(found.shape[1:3]), *whole.shape[2:])

    def share(self, weight: Tensor) -> Tensor:
        """This rank's heads' rows of ``[heads times n, ...]``; the others' gradient is the other ranks'."""
        return torch.unflatten(weight, 0, (self._size, -1))[self._index]
