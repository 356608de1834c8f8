"""Sizes of a model's low-rank adapters, from its shape alone; free of torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gtpo_megatron.config.adapter import AdapterConfig
from gtpo_megatron.weights.model_shape import LayerKind, ModelShape


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


def adapted_layers(shape: ModelShape, targets: Sequence[str], kind: LayerKind) -> Iterator[AdaptedLayer]:
    """The linear layers of a decoder layer that have adapters; delta nets and experts have none.

    Args:
        shape: of the model.
        targets: see ``AdapterConfig``.
        kind: of the decoder layer.
    """
    hidden = shape.hidden_size
    layers = [] if kind.has_delta_net else _of_attention(shape)
    if not kind.has_experts:
        layers.append((hidden, {"gate_proj": shape.ffn_size, "up_proj": shape.ffn_size}, True))
        layers.append((shape.ffn_size, {"down_proj": hidden}, False))
    for inputs, outputs, splits_outputs in layers:
        if chosen := tuple(width for name, width in outputs.items() if name in targets):
            yield AdaptedLayer(inputs, chosen, splits_outputs)


def _of_attention(shape: ModelShape) -> list[tuple[int, dict[str, int], bool]]:
    """Inputs, outputs by projection, and whether tensor-parallel ranks share these, of attention's linear layers."""
    hidden, latents = shape.hidden_size, shape.latents
    output = (shape.output_width, {"o_proj": hidden}, False)
    if latents is None:
        query_width = (2 if shape.has_output_gate else 1) * shape.query_width
        widths = {"q_proj": query_width, "k_proj": shape.key_value_width, "v_proj": shape.value_width}
        return [(hidden, widths, True), output]
    query = "q_proj" if latents.query_rank is None else "q_b_proj"
    keys_and_values = shape.num_heads * (shape.head_size - latents.rotated_size + latents.value_size)
    return [
        (latents.query_rank or hidden, {query: shape.query_width}, True),
        (latents.key_value_rank, {"kv_b_proj": keys_and_values}, True),
        output,
    ]


def num_parameters(shape: ModelShape, config: AdapterConfig) -> int:
    """Elements of all A and B of a model."""
    total = 0
    for kind, num_layers in shape.layers_between(0, shape.num_layers):
        for layer in adapted_layers(shape, config.targets, kind):
            total += num_layers * config.rank * sum(layer.inputs + width for width in layer.outputs)
    return total
