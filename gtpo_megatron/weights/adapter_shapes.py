"""Sizes of a model's low-rank adapters, from its shape alone; free of torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gtpo_megatron.config.adapter import AdapterConfig
from gtpo_megatron.errors import ConfigError
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


def check_adaptable(shape: ModelShape, config: AdapterConfig) -> None:
    """Raises ConfigError if adapters are to be trained over a model that can have none."""
    if config.is_on and shape.delta is not None:
        raise ConfigError(
            f"adapter.rank={config.rank}: a model with gated delta nets and output gates has no adapters; train all "
            f"weights, with --adapter.rank 0"
        )


def adapted_layers(shape: ModelShape, targets: Sequence[str], kind: LayerKind) -> Iterator[AdaptedLayer]:
    """The linear layers of a decoder layer that have adapters; experts have none.

    Args:
        shape: of the model.
        targets: see ``AdapterConfig``.
        kind: of the decoder layer.
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
    if not kind.has_experts:
        layers.append((hidden, {"gate_proj": shape.ffn_size, "up_proj": shape.ffn_size}, True))
        layers.append((shape.ffn_size, {"down_proj": hidden}, False))
    for inputs, outputs, splits_outputs in layers:
        if chosen := tuple(width for name, width in outputs.items() if name in targets):
            yield AdaptedLayer(inputs, chosen, splits_outputs)


def num_parameters(shape: ModelShape, config: AdapterConfig) -> int:
    """Elements of all A and B of a model."""
    total = 0
    for kind, num_layers in shape.layers_between(0, shape.num_layers):
        for layer in adapted_layers(shape, config.targets, kind):
            total += num_layers * config.rank * sum(layer.inputs + width for width in layer.outputs)
    return total
