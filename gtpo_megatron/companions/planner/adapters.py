"""What low-rank adapters take of a rank: their own state, exact, and what they keep for the backward pass."""

from collections import Counter
from dataclasses import replace
from typing import Literal

from gtpo_megatron.companions.planner.activations import FLOAT32_BYTES, Saved
from gtpo_megatron.companions.planner.layout import Layout, layers_of_stage
from gtpo_megatron.companions.planner.trainer_state import StageParameters, TrainerState, trainer_state
from gtpo_megatron.config.adapter import AdapterConfig
from gtpo_megatron.weights.adapter_shapes import adapted_layers
from gtpo_megatron.weights.model_shape import LayerKind, ModelShape


def adapter_parameters(shape: ModelShape, layout: Layout, stage: int, adapter: AdapterConfig) -> StageParameters:
    """The tensors A and B per rank of a pipeline stage."""
    sizes: Counter[int] = Counter()
    of_experts: Counter[int] = Counter()
    for kind, num_layers in layers_of_stage(shape, layout, stage):
        for layer in adapted_layers(shape, adapter, kind):
            inputs = layout.tensor if layer.split == "columns" else 1
            outputs = layout.tensor if layer.split == "rows" else 1
            held = of_experts if layer.num_experts else sizes
            count = num_layers * (layer.num_experts // layout.expert if layer.num_experts else 1)
            for blocks in layer.outputs.values():
                held[adapter.rank * layer.inputs // inputs] += count
                for width in blocks:
                    held[adapter.rank * width // outputs] += count
    dense, experts = (tuple(held.items()) for held in (sizes, of_experts))
    return StageParameters(dense=tuple(one for one in dense if one[1]), experts=experts)


def adapted_state(
    frozen: StageParameters, adapters: StageParameters, layout: Layout, *, weight_bytes: int, adapter_bytes: int
) -> TrainerState:
    """Bytes per rank where adapters are trained over frozen weights, which lie in no buffer of Megatron's.

    Args:
        frozen: the model's parameters.
        adapters: of the same stage.
        layout: of the ranks.
        weight_bytes: per element of the model.
        adapter_bytes: per element of A and B.
    """
    state = trainer_state(adapters, layout, weight_bytes=adapter_bytes)
    routers = frozen.router_bytes + frozen.router_elements * weight_bytes
    return replace(state, weights=state.weights + frozen.num_elements * weight_bytes, routers=routers)


def saved_by_adapters(
    shape: ModelShape, adapter: AdapterConfig, weight_bytes: int, kind: LayerKind
) -> tuple[Saved, ...]:
    """Tensors that the adapters of a decoder layer keep besides the inputs of their linear layers.

    Those the frozen layers do not keep themselves, so that nothing is kept twice; of layers without adapters the plan
    counts the inputs all the same.
    """
    element_bytes = FLOAT32_BYTES if adapter.dtype == "float32" else weight_bytes
    saved: list[Saved] = []
    for layer in adapted_layers(shape, adapter, kind):
        inputs: Literal["sequence", "tensor", "expert"] = "tensor" if layer.split == "columns" else "sequence"
        low, copies = adapter.rank * len(layer.outputs), 1
        if layer.num_experts and shape.experts is not None:
            inputs, copies = "expert", shape.experts.experts_per_token
        product: Literal["whole", "sequence", "expert"] = "sequence" if inputs == "tensor" else inputs
        saved.append(Saved("A x", copies * low, element_bytes, "whole" if layer.split == "rows" else product))
        if element_bytes > weight_bytes:
            saved.append(Saved("inputs of A in float32", copies * layer.inputs, element_bytes, inputs))
    return tuple(saved)
