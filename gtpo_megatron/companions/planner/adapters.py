"""What low-rank adapters take of a rank: their own state, exact, and what they keep for the backward pass."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from gtpo_megatron.companions.planner.activations import FLOAT32_BYTES, Saved
from gtpo_megatron.companions.planner.layout import Layout, layers_of_stage
from gtpo_megatron.companions.planner.trainer_state import StageParameters, TrainerState, trainer_state
from gtpo_megatron.config.adapter import AdapterConfig
from gtpo_megatron.weights.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class AdaptedLayer:
    """A linear layer of Megatron's that has adapters.

    Attributes:
        inputs: over all ranks.
        outputs: of each projection that is a target, over all ranks.
        splits_outputs: tensor-parallel ranks share its outputs; else its inputs.
    """

    inputs: int
    outputs: tuple[int, ...]
    splits_outputs: bool


def adapted_layers(shape: ModelShape, targets: Sequence[str], *, has_experts: bool) -> Iterator[AdaptedLayer]:
    """The linear layers of a decoder layer that have adapters; experts have none.

    Args:
        shape: of the model.
        targets: see ``AdapterConfig``.
        has_experts: the decoder layer has experts in the place of an MLP.
    """
    hidden, latents = shape.hidden_size, shape.latents
    layers: list[tuple[int, dict[str, int], bool]] = []
    if latents is None:
        widths = {"q_proj": shape.query_width, "k_proj": shape.key_value_width, "v_proj": shape.value_width}
        layers.append((hidden, widths, True))
    else:
        query = "q_proj" if latents.query_rank is None else "q_b_proj"
        keys_and_values = shape.num_heads * (shape.head_size - latents.rotated_size + latents.value_size)
        layers.append((latents.query_rank or hidden, {query: shape.query_width}, True))
        layers.append((latents.key_value_rank, {"kv_b_proj": keys_and_values}, True))
    layers.append((shape.output_width, {"o_proj": hidden}, False))
    if not has_experts:
        layers.append((hidden, {"gate_proj": shape.ffn_size, "up_proj": shape.ffn_size}, True))
        layers.append((shape.ffn_size, {"down_proj": hidden}, False))
    for inputs, outputs, splits_outputs in layers:
        if chosen := tuple(width for name, width in outputs.items() if name in targets):
            yield AdaptedLayer(inputs, chosen, splits_outputs)


def adapter_parameters(shape: ModelShape, layout: Layout, stage: int, adapter: AdapterConfig) -> StageParameters:
    """The tensors A and B per rank of a pipeline stage."""
    sizes: Counter[int] = Counter()
    for has_experts, num_layers in zip((False, True), layers_of_stage(shape, layout, stage), strict=True):
        for layer in adapted_layers(shape, adapter.targets, has_experts=has_experts):
            inputs, outputs = (1, layout.tensor) if layer.splits_outputs else (layout.tensor, 1)
            for width in layer.outputs:
                sizes[adapter.rank * layer.inputs // inputs] += num_layers
                sizes[adapter.rank * width // outputs] += num_layers
    return StageParameters(dense=tuple((elements, count) for elements, count in sizes.items() if count))


def num_trained(shape: ModelShape, adapter: AdapterConfig) -> int:
    """Parameters of the whole model that a run trains."""
    if not adapter.is_on:
        return shape.num_parameters
    return adapter_parameters(shape, Layout(num_ranks=1), 0, adapter).num_elements


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
    shape: ModelShape, adapter: AdapterConfig, weight_bytes: int, *, has_experts: bool
) -> tuple[Saved, ...]:
    """Tensors that the adapters of a decoder layer keep besides the inputs of their linear layers.

    Those the frozen layers do not keep themselves, so that nothing is kept twice; of layers without adapters the plan
    counts the inputs all the same.
    """
    element_bytes = FLOAT32_BYTES if adapter.dtype == "float32" else weight_bytes
    saved: list[Saved] = []
    for layer in adapted_layers(shape, adapter.targets, has_experts=has_experts):
        low = adapter.rank * len(layer.outputs)
        saved.append(Saved("A x", low, element_bytes, "whole" if layer.splits_outputs else "sequence"))
        if element_bytes > weight_bytes:
            shared: Literal["sequence", "tensor"] = "sequence" if layer.splits_outputs else "tensor"
            saved.append(Saved("inputs of A in float32", layer.inputs, element_bytes, shared))
    return tuple(saved)
