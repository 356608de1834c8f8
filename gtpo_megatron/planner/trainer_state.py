"""What a trainer's rank holds from step to step: weights, gradients, optimizer. Exact, as Megatron lays it out."""

import math
from dataclasses import dataclass, field
from typing import TypeAlias

from gtpo_megatron.planner.layout import Layout
from gtpo_megatron.planner.shape import ModelShape

GRADIENT_BYTES = 4
"""Gradients are accumulated in float32."""

MOMENT_BYTES = 8
"""Adam's two moments in float32."""

PARAMETER_ALIGNMENT = 64
"""Elements: Megatron starts every parameter there in the buffers of a distributed optimizer."""

BUFFER_ALIGNMENT = 128
"""Elements: the buffer ends at a multiple of this and of the number of ranks that share it."""


Sizes: TypeAlias = tuple[tuple[int, int], ...]
"""Parameter tensors as (elements, how many of that size)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageParameters:
    """The parameter tensors of one rank.

    Attributes:
        dense: split over tensor-parallel ranks or equal on them, replicated over data x context.
        experts: of the experts this rank holds, replicated over fewer ranks.
        shared_embedding: elements of a tied embedding of a pipeline, which Megatron keeps in a bucket of its own; else
            0. It is not among ``dense``.
        num_elements: of all tensors.
        num_expert_elements: of the experts' tensors.
        largest: elements of the largest tensor.
    """

    dense: Sizes
    experts: Sizes = ()
    shared_embedding: int = 0
    num_elements: int = field(init=False)
    num_expert_elements: int = field(init=False)
    largest: int = field(init=False)

    def __post_init__(self) -> None:
        # once: every layout asks for them many times
        experts = sum(elements * count for elements, count in self.experts)
        dense = sum(elements * count for elements, count in self.dense)
        largest = max(self.shared_embedding, *(elements for elements, _ in (*self.dense, *self.experts)))
        for name, value in (
            ("num_elements", dense + experts + self.shared_embedding),
            ("num_expert_elements", experts),
            ("largest", largest),
        ):
            object.__setattr__(self, name, value)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerState:
    """Bytes of one rank.

    Attributes:
        weights: in the precision of the forward pass.
        gradients: Megatron's accumulation buffer.
        optimizer: float32 master weights (none if the weights are float32 already) and Adam's moments.
        optimizer_on_host: the same, and gradients, of the share that is offloaded.
    """

    weights: int
    gradients: int
    optimizer: int
    optimizer_on_host: int = 0


def stage_parameters(shape: ModelShape, layout: Layout, stage: int, vocab_multiple: int) -> StageParameters:
    """The parameter tensors per rank of a pipeline stage.

    Args:
        shape: of the model.
        layout: of the ranks.
        stage: which pipeline stage, from 0.
        vocab_multiple: the vocabulary is padded to a multiple of this times ``layout.tensor``.
    """
    layers = shape.num_layers // layout.pipeline
    dense = [(elements, layers) for elements in _layer_parameters(shape, layout.tensor)]
    first, last = stage == 0, stage == layout.pipeline - 1
    unit = layout.tensor * vocab_multiple
    vocabulary = -(-shape.vocab_size // unit) * unit // layout.tensor * shape.hidden_size
    shared = 0
    if shape.tied_embeddings and layout.pipeline > 1:
        shared = vocabulary if first or last else 0
    elif first:
        dense.append((vocabulary, 1))
    if last:
        dense.append((shape.hidden_size, 1))
        if not shape.tied_embeddings:
            dense.append((vocabulary, 1))
    experts: Sizes = ()
    if shape.experts is not None:
        here, matrix = shape.experts.num_experts // layout.expert, shape.experts.ffn_size * shape.hidden_size
        experts = ((2 * matrix, here * layers), (matrix, here * layers))
    return StageParameters(dense=tuple(dense), experts=experts, shared_embedding=shared)


def _layer_parameters(shape: ModelShape, tensor: int) -> list[int]:
    """Elements of a layer's tensors per rank, experts left out."""
    hidden, qkv = shape.hidden_size, (shape.query_width + 2 * shape.key_value_width) // tensor
    sizes = [hidden, qkv * hidden, shape.query_width // tensor * hidden, hidden]
    if shape.qkv_bias:
        sizes.append(qkv)
    if shape.qk_norm:
        sizes += [shape.head_size, shape.head_size]
    if shape.experts is not None:
        return [*sizes, shape.experts.num_experts * hidden]
    width = shape.ffn_size // tensor
    return [*sizes, 2 * width * hidden, width * hidden]


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
    master_bytes = MOMENT_BYTES + (GRADIENT_BYTES if weight_bytes < GRADIENT_BYTES else 0)
    if not layout.distributed_optimizer:
        elements = parameters.num_elements
        return TrainerState(
            weights=elements * weight_bytes, gradients=elements * GRADIENT_BYTES, optimizer=elements * master_bytes
        )
    replicas, expert_replicas = layout.data * layout.context, layout.expert_data
    shared = ((parameters.shared_embedding, 1),) if parameters.shared_embedding else ()
    dense = _buffer_elements(parameters.dense, replicas) + _buffer_elements(shared, replicas)
    experts = _buffer_elements(parameters.experts, expert_replicas)
    mine = dense // replicas + experts // expert_replicas
    return TrainerState(
        weights=(dense + experts) * weight_bytes,
        gradients=(dense + experts) * GRADIENT_BYTES,
        optimizer=int(mine * (1 - offload_fraction)) * master_bytes,
        optimizer_on_host=int(mine * offload_fraction) * (MOMENT_BYTES + 2 * GRADIENT_BYTES),
    )


def _buffer_elements(sizes: Sizes, replicas: int) -> int:
    """Of one of Megatron's contiguous buffers, which hold one bucket as long as reductions do not overlap."""
    filled = sum(-(-elements // PARAMETER_ALIGNMENT) * PARAMETER_ALIGNMENT * count for elements, count in sizes)
    unit = math.lcm(replicas, BUFFER_ALIGNMENT)
    return -(-filled // unit) * unit
