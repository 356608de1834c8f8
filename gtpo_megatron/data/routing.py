"""The experts that tokens are sent to: from rows of a batch to what a rank's routers see, and back. Pure.

A rank routes the tokens that it holds of a packed micro-batch: under context parallelism its two chunks of every
sequence (``data/packing.py``), of which sequence parallelism gives each tensor-parallel rank an equal slice. Routing is
kept per sequence and position instead, since the update packs the rows of a scoring pass into other micro-batches.

Shapes: ``M`` routers, ``k`` experts per token, ``P`` packed tokens, ``s`` of them on this rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gtpo_megatron.data.packing import PackedMicroBatch, held_positions

Routing = Mapping[tuple[int, int], Tensor]
"""``[n, M, k]`` by row and number of the sequence in it (``PackedMicroBatch.sequences``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingLayout:
    """The routers of a rank, and how the tokens of a packed micro-batch are shared.

    Attributes:
        num_routers: routers ``M`` in the layers that this rank holds.
        experts_per_token: experts ``k`` that a router chooses for a token.
        num_experts: experts of a router.
        context_size: ranks that share every sequence.
        sequence_size: ranks that share what a context-parallel rank holds; 1 without sequence parallelism.
    """

    num_routers: int
    experts_per_token: int
    num_experts: int
    context_size: int = 1
    sequence_size: int = 1

    @property
    def dtype(self) -> torch.dtype:
        """The smallest that holds an expert's number."""
        return expert_dtype(self.num_experts)

    def positions(self, batch: PackedMicroBatch, context_index: int, sequence_index: int) -> Tensor:
        """``[s]`` int64, the packed positions whose tokens a rank routes, in the order of its routers' rows."""
        bounds = batch.cu_seqlens.tolist()
        held = torch.arange(bounds[-1])
        if self.context_size > 1:
            held = held_positions(bounds, self.context_size, context_index)
        return held.chunk(self.sequence_size)[sequence_index]

    def pack(self, routing: Routing, batch: PackedMicroBatch) -> tuple[Tensor, Tensor]:
        """Packs the routing of a micro-batch for the routers of all ranks together.

        Args:
            routing: of each sequence's first ``n`` tokens.
            batch: the micro-batch.

        Returns:
            ``[P, M, k]``, and ``[P]`` bool: which tokens have routing. Padding has none, nor has a sequence's last
            token if the routing is the sampler's, which has not run it.
        """
        assert not any(batch.prefixes)  # forward_backward.min_prefix_tokens says so of mixtures
        num_tokens = int(batch.cu_seqlens[-1])
        packed = torch.zeros(num_tokens, self.num_routers, self.experts_per_token, dtype=self.dtype)
        has_routing = torch.zeros(num_tokens, dtype=torch.bool)
        for sequence, start in zip(batch.sequences, batch.cu_seqlens.tolist(), strict=False):
            end = start + len(routing[sequence])
            packed[start:end], has_routing[start:end] = routing[sequence], True
        return packed, has_routing


def expert_dtype(num_experts: int) -> torch.dtype:
    """The smallest that holds an expert's number: a byte for up to 256 experts."""
    return torch.uint8 if num_experts <= 256 else torch.int16


def unpack_routing(packed: Tensor, batch: PackedMicroBatch, lengths: Mapping[int, Sequence[int]]) -> Routing:
    """The routing of each sequence of a micro-batch, a copy.

    Args:
        packed: ``[P, M, k]``, of the whole micro-batch.
        batch: the micro-batch.
        lengths: tokens of the sequences of each row (``RolloutBatch.sequence_lengths``).
    """
    starts = batch.cu_seqlens.tolist()
    return {
        (row, number): packed[start : start + lengths[row][number]].clone()
        for (row, number), start in zip(batch.sequences, starts, strict=False)
    }


def routing_mismatch(ours: Tensor, theirs: Tensor) -> Tensor:
    """``[n, M]`` bool: the two sets of experts of a token differ, whatever their order.

    Args:
        ours: ``[n, M, k]``.
        theirs: other choices for the same tokens, likewise.
    """
    return (ours.sort(-1).values != theirs.sort(-1).values).any(-1)
