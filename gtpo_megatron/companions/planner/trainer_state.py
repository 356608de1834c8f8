"""Memory of a trainer's rank from step to step: weights, gradients, optimizer. Exact, as Megatron lays it out."""

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TypeAlias

from gtpo_megatron.companions.planner.layout import Layout, layers_of_stage
from gtpo_megatron.weights.model_shape import LayerKind, ModelShape

GRADIENT_BYTES = 4
"""Gradients are accumulated in float32."""

MOMENT_BYTES = 8
"""Adam's two moments in float32."""

PARAMETER_ALIGNMENT = 64
"""Elements: Megatron starts every parameter there in the buffers of a distributed optimizer."""

FLOAT32_BYTES, INDEX_BYTES = 4, 8

BUFFER_ALIGNMENT = 128
"""Elements: the buffer ends at a multiple of this and of the number of ranks that share it."""


Sizes: TypeAlias = tuple[tuple[int, int], ...]
"""Parameter tensors as (elements, how many of that size)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageParameters:
    """The parameter tensors of one rank.

    Attributes:
        dense: split over tensor-parallel ranks or equal on them, replicated over data x context; routers and shared
            experts are among them.
        experts: parameters of the experts that this rank holds, replicated over the expert-data ranks.
        shared_embedding: elements of a tied embedding of a pipeline, which Megatron keeps in a bucket of its own; else
            0. It is not among ``dense``.
        router_bytes: bytes that routers and dispatchers hold beside parameters, whatever the weights' precision.
        router_elements: elements that routers hold beside them in the weights' precision.
        num_elements: elements of all tensors.
        num_expert_elements: elements of the experts' tensors.
        num_dense_elements: elements of all other tensors.
        largest: elements of the largest tensor.
    """

    dense: Sizes
    experts: Sizes = ()
    shared_embedding: int = 0
    router_bytes: int = 0
    router_elements: int = 0
    num_elements: int = field(init=False)
    num_expert_elements: int = field(init=False)
    num_dense_elements: int = field(init=False)
    largest: int = field(init=False)

    def __post_init__(self) -> None:
        # once: every layout asks for them many times
        experts = sum(elements * count for elements, count in self.experts)
        dense = sum(elements * count for elements, count in self.dense)
        largest = max(self.shared_embedding, *(elements for elements, _ in (*self.dense, *self.experts)))
        for name, value in (
            ("num_elements", dense + experts + self.shared_embedding),
            ("num_expert_elements", experts),
            ("num_dense_elements", dense + self.shared_embedding),
            ("largest", largest),
        ):
            object.__setattr__(self, name, value)

    def replicated(self, layout: Layout) -> tuple[tuple[int, int], tuple[int, int]]:
        """(elements, ranks that hold the same ones): of the dense parameters, and of the experts."""
        return (
            (self.num_dense_elements, layout.data * layout.context),
            (self.num_expert_elements, layout.expert_data),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerState:
    """Bytes of one rank.

    Attributes:
        weights: weights in the precision of the forward pass.
        gradients: Megatron's accumulation buffer.
        optimizer: float32 master weights (none if the weights are float32 already) and Adam's moments.
        routers: tensors of routers and dispatchers that are no parameters.
        optimizer_on_host: optimizer state and gradients of the share that is offloaded.
    """

    weights: int
    gradients: int
    optimizer: int
    routers: int = 0
    optimizer_on_host: int = 0


def stage_parameters(shape: ModelShape, layout: Layout, stage: int, vocab_multiple: int) -> StageParameters:
    """The parameter tensors per rank of a pipeline stage.

    Args:
        shape: of the model.
        layout: of the ranks.
        stage: which pipeline stage, from 0.
        vocab_multiple: the vocabulary is padded to a multiple of this times ``layout.tensor``.
    """
    dense: Counter[int] = Counter()
    experts: Counter[int] = Counter()
    num_sparse = 0
    for kind, count in layers_of_stage(shape, layout, stage):
        num_sparse += count * kind.has_experts
        for held, tensors in zip((dense, experts), layer_tensors(shape, layout, kind), strict=True):
            for elements, per_layer in tensors:
                held[elements] += count * per_layer
    first, last = stage == 0, stage == layout.pipeline - 1
    vocabulary = vocabulary_elements(shape, layout, vocab_multiple)
    shared = 0
    if shape.tied_embeddings and layout.pipeline > 1:
        shared = vocabulary if first or last else 0
    elif first:
        dense[vocabulary] += 1
    if last:
        dense[shape.hidden_size] += 1
        if not shape.tied_embeddings:
            dense[vocabulary] += 1
    return StageParameters(
        dense=tuple(dense.items()),
        experts=tuple(experts.items()),
        shared_embedding=shared,
        router_bytes=num_sparse * _router_bytes(shape, layout),
        # Megatron counts tokens for biases, in a buffer that is cast with the model
        router_elements=num_sparse * shape.experts.num_experts if shape.experts and shape.experts.has_bias else 0,
    )


def vocabulary_elements(shape: ModelShape, layout: Layout, vocab_multiple: int) -> int:
    """Elements of the embedding on a rank, and of the output layer."""
    unit = layout.tensor * vocab_multiple
    return -(-shape.vocab_size // unit) * unit // layout.tensor * shape.hidden_size


def layer_tensors(shape: ModelShape, layout: Layout, kind: LayerKind) -> tuple[Sizes, Sizes]:
    """The tensors of a layer on a rank: those outside its experts, and its experts'."""
    dense = shape.attention_tensors(kind, layout.tensor)
    if not kind.has_experts:
        dense += _mlp_tensors(shape.hidden_size, shape.ffn_size // layout.tensor)
        return tuple((elements, 1) for elements in dense), ()
    assert shape.experts is not None
    dense.append(shape.experts.num_experts * shape.hidden_size)
    if shape.experts.shared_ffn_size:
        dense += _mlp_tensors(shape.hidden_size, shape.experts.shared_ffn_size // layout.tensor)
    if shape.experts.has_shared_gate:
        dense.append(shape.hidden_size)
    here, width = shape.experts.num_experts // layout.expert, shape.experts.ffn_size // layout.expert_tensor
    of_expert = _mlp_tensors(shape.hidden_size, width)
    if shape.experts.clamp:  # biases, of the router too
        dense.append(shape.experts.num_experts)
        of_expert += [2 * width, shape.hidden_size]
    return tuple((elements, 1) for elements in dense), tuple((elements, here) for elements in of_expert)


def _router_bytes(shape: ModelShape, layout: Layout) -> int:
    """Bytes per layer with experts: expert bias, counts of tokens, and the order of the dispatcher's pieces."""
    if shape.experts is None:
        return 0
    num = shape.experts.num_experts
    counted = num * (INDEX_BYTES + FLOAT32_BYTES * shape.experts.has_bias)
    # one table there and one back; two views of one if there is nothing to sort
    is_sorted = layout.expert * layout.expert_tensor > 1 and num > layout.expert
    return counted + num * layout.expert_tensor * INDEX_BYTES * (2 if is_sorted else 1)


def _mlp_tensors(hidden: int, width: int) -> list[int]:
    """Elements of a gated MLP's two matrices, ``width`` columns wide on this rank."""
    return [2 * width * hidden, width * hidden]


def trainer_state(
    parameters: StageParameters, layout: Layout, *, weight_bytes: int, offload_fraction: float = 0.0
) -> TrainerState:
    """Bytes per rank, padding of Megatron's buffers included.

    Args:
        parameters: of the rank.
        layout: of the ranks.
        weight_bytes: per element in the forward pass: 2 or 4.
        offload_fraction: share of a distributed optimizer that lives on the host; Megatron moves whole tensors until it
            is reached.
    """
    routers = parameters.router_bytes + parameters.router_elements * weight_bytes
    master_bytes = MOMENT_BYTES + (GRADIENT_BYTES if weight_bytes < GRADIENT_BYTES else 0)
    if not layout.distributed_optimizer:
        elements = parameters.num_elements
        return TrainerState(
            weights=elements * weight_bytes,
            gradients=elements * GRADIENT_BYTES,
            optimizer=elements * master_bytes,
            routers=routers,
        )
    (_, replicas), (_, expert_replicas) = parameters.replicated(layout)
    shared = ((parameters.shared_embedding, 1),) if parameters.shared_embedding else ()
    dense = _buffer_elements(parameters.dense, replicas) + _buffer_elements(shared, replicas)
    experts = _buffer_elements(parameters.experts, expert_replicas)
    mine = dense // replicas + experts // expert_replicas
    return TrainerState(
        weights=(dense + experts) * weight_bytes,
        gradients=(dense + experts) * GRADIENT_BYTES,
        optimizer=int(mine * (1 - offload_fraction)) * master_bytes,
        routers=routers,
        optimizer_on_host=int(mine * offload_fraction) * (MOMENT_BYTES + 2 * GRADIENT_BYTES),
    )


def _buffer_elements(sizes: Sizes, replicas: int) -> int:
    """Elements of one of Megatron's contiguous buffers: one bucket each as long as reductions do not overlap."""
    filled = sum(-(-elements // PARAMETER_ALIGNMENT) * PARAMETER_ALIGNMENT * count for elements, count in sizes)
    unit = math.lcm(replicas, BUFFER_ALIGNMENT)
    return -(-filled // unit) * unit
