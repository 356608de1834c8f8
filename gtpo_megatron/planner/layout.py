"""Layouts: how many ranks share what, and which ones a model and a cluster allow."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from gtpo_megatron.config.checks import divisors
from gtpo_megatron.planner.shape import ModelShape

Recompute = Literal["none", "selective", "full"]
"""From the fastest to the smallest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The trainer's ranks: ``num_ranks = tensor x pipeline x context x data``.

    Attributes:
        num_ranks: of the trainer.
        tensor: ranks that share every layer's matrices.
        pipeline: ranks that share the layers.
        virtual: chunks of layers per stage (interleaved schedule); 1: the layers of a stage are one piece.
        context: ranks that share every sequence.
        expert: ranks that share the experts of a layer, out of tensor x context x data; 1 for a dense model.
        sequence_parallel: activations between the tensor-parallel regions are split over ``tensor`` too.
        distributed_optimizer: optimizer state is split over data x context.
        recompute: which activations are made again in the backward pass.
    """

    num_ranks: int
    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    context: int = 1
    expert: int = 1
    sequence_parallel: bool = False
    distributed_optimizer: bool = True
    recompute: Recompute = "none"

    @property
    def data(self) -> int:
        """Replicas of the model."""
        return self.num_ranks // self.model_ranks

    @property
    def model_ranks(self) -> int:
        """Ranks that must talk to each other for one micro-batch."""
        return self.tensor * self.pipeline * self.context

    @property
    def expert_data(self) -> int:
        """Replicas of an expert; experts are not split over ``tensor``."""
        return self.num_ranks // (self.pipeline * self.expert)

    @property
    def sequence_split(self) -> int:
        """Over how many of the tensor-parallel ranks activations outside the tensor-parallel regions are split."""
        return self.tensor if self.sequence_parallel else 1

    def __str__(self) -> str:
        """As people write it: ``TP8 PP4 DP2``; axes of size 1 are left out."""
        axes = (("TP", self.tensor), ("PP", self.pipeline), ("VPP", self.virtual), ("CP", self.context))
        shown = [f"{name}{size}" for name, size in (*axes, ("EP", self.expert)) if size > 1]
        return " ".join([*shown, f"DP{self.data}"])


def layouts(shape: ModelShape, *, num_ranks: int, gpus_per_node: int) -> Iterator[Layout]:
    """Every layout that the model and the ranks allow, with sequence parallelism and a distributed optimizer.

    Tensor-parallel ranks are within a node, and their number divides heads, key-value heads and the MLP's width;
    stages and chunks have equal numbers of layers. Without recomputation: that is for the caller to vary.
    """
    for tensor in divisors(num_ranks):
        if tensor > gpus_per_node or gpus_per_node % tensor or not divides_model(shape, tensor):
            continue
        for pipeline in divisors(num_ranks // tensor):
            if shape.num_layers % pipeline:
                continue
            for context in divisors(num_ranks // (tensor * pipeline)):
                base = Layout(
                    num_ranks=num_ranks,
                    tensor=tensor,
                    pipeline=pipeline,
                    context=context,
                    sequence_parallel=tensor > 1,
                    distributed_optimizer=True,
                )
                yield from _with_chunks_and_experts(shape, base)


def divides_model(shape: ModelShape, tensor: int) -> bool:
    """Whether heads, key-value heads and the dense MLP split evenly."""
    widths = [shape.num_heads, shape.num_query_groups]
    if shape.experts is None:
        widths.append(shape.ffn_size)
    return not any(width % tensor for width in widths)


def _with_chunks_and_experts(shape: ModelShape, base: Layout) -> Iterator[Layout]:
    chunks = divisors(shape.num_layers // base.pipeline) if base.pipeline > 1 else [1]
    experts = [1]
    if shape.experts is not None:
        experts = [e for e in divisors(shape.experts.num_experts) if (base.num_ranks // base.pipeline) % e == 0]
    for virtual in chunks:
        for expert in experts:
            yield replace(base, virtual=virtual, expert=expert)
