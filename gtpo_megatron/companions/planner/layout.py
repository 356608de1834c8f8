"""Layouts: how many ranks share what, and which ones a model and a cluster allow."""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from gtpo_megatron.config.checks import divisors
from gtpo_megatron.config.parallel import LayerSplit
from gtpo_megatron.weights.model_shape import LayerCounts, LayerKind, ModelShape

Recompute = Literal["none", "selective", "experts", "full"]
"""From the fastest to the smallest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The trainer's ranks: ``num_ranks = tensor x pipeline x context x data``.

    Attributes:
        num_ranks: number of the trainer's ranks.
        tensor: ranks that share every layer's matrices.
        pipeline: ranks that share the layers.
        virtual: chunks of layers per stage (interleaved schedule); 1: the layers of a stage are one piece.
        last_layers: layers of the last stage, which has the output layer too; None: as many as the others have.
        context: ranks that share every sequence.
        expert: ranks that share the experts of a layer, out of tensor x context x data; 1 for a dense model.
        expert_tensor: ranks that share the matrices of each expert. A stage's ranks are
            ``expert tensor x expert x expert data``, a partition of its own beside ``tensor x context x data``.
        sequence_parallel: activations between the tensor-parallel regions are split over ``tensor`` too.
        distributed_optimizer: optimizer state is split over the ranks that hold the same weights: data x context, for
            experts expert data.
        recompute: activations that are made again in the backward pass.
    """

    num_ranks: int
    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    last_layers: int | None = None
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    sequence_parallel: bool = False
    distributed_optimizer: bool = True
    recompute: Recompute = "none"

    @property
    def layer_split(self) -> LayerSplit:
        """Which layers each virtual stage holds."""
        return LayerSplit(self.pipeline, self.virtual, self.last_layers)

    @property
    def data(self) -> int:
        """Replicas of the model."""
        return self.num_ranks // (self.tensor * self.pipeline * self.context)

    @property
    def model_ranks(self) -> int:
        """Ranks that must talk to each other for one micro-batch; ranks that share experts may be of many replicas."""
        return self.pipeline * max(self.tensor * self.context, self.expert * self.expert_tensor)

    @property
    def stage_ranks(self) -> int:
        """Ranks of a pipeline stage."""
        return self.num_ranks // self.pipeline

    @property
    def expert_data(self) -> int:
        """Replicas of an expert."""
        return self.stage_ranks // (self.expert * self.expert_tensor)

    @property
    def sequence_split(self) -> int:
        """Over how many of the tensor-parallel ranks activations outside the tensor-parallel regions are split."""
        return self.tensor if self.sequence_parallel else 1

    def busiest_load(self, imbalance: float) -> float:
        """Token copies that the busiest rank of an expert-parallel group receives, over the group's mean.

        Args:
            imbalance: the assumed ratio; it is capped by ``expert``, since a rank cannot receive more than all copies.
        """
        return min(imbalance, self.expert)

    def __str__(self) -> str:
        """The usual short form: ``TP8 PP4 DP2``; axes of size 1 are left out. ``PP4(last 13)``: 13 layers there."""
        axes = (("TP", self.tensor), ("PP", self.pipeline), ("VPP", self.virtual), ("CP", self.context))
        experts = (("EP", self.expert), ("ETP", self.expert_tensor))
        shown = [f"{name}{size}" for name, size in (*axes, *experts) if size > 1]
        if self.last_layers is not None:
            shown = [f"{axis}(last {self.last_layers})" if axis.startswith("PP") else axis for axis in shown]
        return " ".join([*shown, f"DP{self.data}"])


def layouts(shape: ModelShape, *, num_ranks: int, gpus_per_node: int) -> Iterator[Layout]:
    """Every layout that the model and the ranks allow, with sequence parallelism and a distributed optimizer.

    Tensor-parallel ranks are within a node, and their number divides every kind of heads and the MLP's width; stages
    and chunks have equal numbers of layers, but the last stage, which has the output layer, also one or two steps
    fewer; the ranks that share an expert's matrices are no more than the tensor-parallel ones. Without recomputation,
    which the caller varies.
    """
    for tensor in divisors(num_ranks):
        if tensor > gpus_per_node or gpus_per_node % tensor or not divides_model(shape, tensor):
            continue
        for pipeline in divisors(num_ranks // tensor):
            for context in divisors(num_ranks // (tensor * pipeline)):
                if not shape.can_share_context(tensor, context):
                    continue
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
    """Whether heads, key-value heads, delta nets' key heads, dense MLPs and shared experts split evenly."""
    widths = [shape.num_heads, shape.num_query_groups]
    if shape.delta is not None:
        widths.append(shape.delta.num_key_heads)
    if shape.num_expert_layers < shape.num_layers:
        widths.append(shape.ffn_size)
    if shape.experts is not None:
        widths.append(shape.experts.shared_ffn_size)
    return not any(width % tensor for width in widths)


def takes_layout(shape: ModelShape, layout: Layout) -> bool:
    """Whether another model than the one that a layout was made for can be split so: a teacher."""
    experts, expert_tensors = expert_sizes(shape, layout.stage_ranks)
    return (
        divides_model(shape, layout.tensor)
        and shape.can_share_context(layout.tensor, layout.context)
        and layout.layer_split.problem(shape.num_layers) is None
        and layout.expert in experts
        and layout.expert_tensor in expert_tensors
    )


def expert_sizes(shape: ModelShape, stage_ranks: int) -> tuple[list[int], list[int]]:
    """Sizes of the expert and the expert-tensor axis that a model and the ranks of a stage allow, each by itself."""
    if shape.experts is None:
        return [1], [1]
    allowed = divisors(stage_ranks)
    return (
        [size for size in allowed if shape.experts.num_experts % size == 0],
        [size for size in allowed if shape.experts.ffn_size % size == 0] if not shape.experts.clamp else [1],
    )


def layers_of_chunk(shape: ModelShape, layout: Layout, stage: int, chunk: int) -> LayerCounts:
    """Layers of each kind in one of a stage's chunks; Megatron deals chunks in turns."""
    return _layers_of_chunk(shape, layout.layer_split, chunk * layout.pipeline + stage)


def _layers_of_chunk(shape: ModelShape, split: LayerSplit, virtual_stage: int) -> LayerCounts:
    layers = split.layers(shape.num_layers, virtual_stage)
    return shape.layers_between(layers.start, layers.stop)


def layers_of_stage(shape: ModelShape, layout: Layout, stage: int) -> LayerCounts:
    """A stage's layers of each kind, over all of its chunks."""
    return _layers_of_stage(shape, layout.layer_split, stage)


@functools.cache  # layouts that deal layers alike share it, with every recomputation
def _layers_of_stage(shape: ModelShape, split: LayerSplit, stage: int) -> LayerCounts:
    total: Counter[LayerKind] = Counter()
    for virtual_stage in range(stage, split.num_stages, split.pipeline):
        total.update(dict(_layers_of_chunk(shape, split, virtual_stage)))
    return tuple(sorted(total.items()))


@functools.cache
def layer_splits(num_layers: int, pipeline: int) -> tuple[LayerSplit, ...]:
    """Every way to deal layers that is worth judging: equal stages, and a last one with fewer.

    Of the numbers of layers that the last stage can have with the others equal, the two closest below an equal share
    that are at least half of one: the output layer of the known models is worth one to three layers.
    """
    if pipeline == 1:
        return (LayerSplit(),)
    found = []
    for virtual in range(1, num_layers // pipeline + 1):
        even = LayerSplit(pipeline, virtual)
        if even.problem(num_layers) is None:
            found.append(even)
        share = num_layers / pipeline
        fewer = (
            LayerSplit(pipeline, virtual, last)
            for last in range(math.ceil(share) - 1, math.ceil(share / 2) - 1, -1)
            if last > 0
        )
        found += itertools.islice((split for split in fewer if split.problem(num_layers) is None), 2)
    return tuple(found)


def _with_chunks_and_experts(shape: ModelShape, base: Layout) -> Iterator[Layout]:
    experts, expert_tensors = expert_sizes(shape, base.stage_ranks)
    for split in layer_splits(shape.num_layers, base.pipeline):
        for expert in experts:
            for expert_tensor in expert_tensors:
                # more ranks than share the other matrices would only send more
                if expert_tensor <= base.tensor and base.stage_ranks % (expert * expert_tensor) == 0:
                    yield replace(
                        base,
                        virtual=split.virtual,
                        last_layers=split.last_rank_layers,
                        expert=expert,
                        expert_tensor=expert_tensor,
                    )
