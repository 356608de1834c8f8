"""Sizes of a model's low-rank adapters, from its shape alone; free of torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gtpo_megatron.config.adapter import AdapterConfig
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.weights.model_shape import LayerKind, ModelShape

_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class AdaptedLayer:
    """A linear layer of Megatron's that has adapters.

    Attributes:
        inputs: over all ranks.
        outputs: outputs of each projection that is a target, over all ranks.
        splits_outputs: tensor-parallel ranks share its outputs; else its inputs.
    """

    inputs: int
    outputs: tuple[int, ...]
    splits_outputs: bool


def check_adaptable(shape: ModelShape, config: AdapterConfig) -> None:
    """Checks that a model can have these adapters.

    Raises:
        ConfigError: the model can have none; a target is no projection that can, or none that vLLM can add adapters to
            where these travel alone; or a matrix is smaller than the rank.
    """
    if not config.is_on:
        return
    if shape.delta is not None:
        raise ConfigError(
            f"adapter.rank={config.rank}: a model with gated delta nets and output gates has no adapters; train all "
            f"weights, with --adapter.rank 0"
        )
    targets, known = config.targets, _smaller_sides(shape)
    if shape.experts is not None and (of_experts := [target for target in targets if target in _OF_EXPERTS]):
        rest = " ".join(name for name in known if name not in _OF_EXPERTS)
        raise ConfigError(
            f"adapter.targets={targets!r}: {of_experts[0]} is a projection of experts, which have no adapters; train "
            f"those of attention, with --adapter.targets {rest}, or all weights, with --adapter.rank 0"
        )
    if unknown := [target for target in targets if target not in known]:
        raise ConfigError(
            f"adapter.targets={targets!r}: {unknown[0]} is no projection of this model that can have adapters; it has "
            f"{', '.join(known)}"
        )
    if config.pushes_alone and "kv_b_proj" in targets:
        raise ConfigError(
            f"adapter.targets={targets!r} with adapter.push='adapters': vLLM multiplies kv_b_proj into other weights, "
            f"where its adapters have no effect; use push='merged', or leave it out"
        )
    smallest = min(targets, key=lambda target: known[target])
    if config.rank > known[smallest]:
        raise ConfigError(
            f"adapter.rank={config.rank} exceeds {known[smallest]}, the smaller side of {smallest}: no product has a "
            f"higher rank; use {known[smallest]} or less"
        )


def _smaller_sides(shape: ModelShape) -> dict[str, int]:
    """Every projection that can have adapters, with the smaller side of its matrix."""
    return {
        name: min(inputs, width)
        for kind, _ in shape.layers_between(0, shape.num_layers)
        for inputs, outputs, _ in _linears(shape, kind)
        for name, width in outputs.items()
    }


def adapted_layers(shape: ModelShape, targets: Sequence[str], kind: LayerKind) -> Iterator[AdaptedLayer]:
    """The linear layers of a decoder layer that have adapters; experts have none.

    Args:
        shape: shape of the model.
        targets: see ``AdapterConfig``.
        kind: kind of the decoder layer.
    """
    for inputs, outputs, splits_outputs in _linears(shape, kind):
        if chosen := tuple(width for name, width in outputs.items() if name in targets):
            yield AdaptedLayer(inputs, chosen, splits_outputs)


def _linears(shape: ModelShape, kind: LayerKind) -> Iterator[tuple[int, dict[str, int], bool]]:
    """Of the linear layers that can have adapters: inputs, outputs by projection, and as ``splits_outputs``."""
    hidden, latents = shape.hidden_size, shape.latents
    if latents is not None:
        query = "q_proj" if latents.query_rank is None else "q_b_proj"
        keys_and_values = shape.num_heads * (shape.head_size - latents.rotated_size + latents.value_size)
        yield latents.query_rank or hidden, {query: shape.query_width}, True
        yield latents.key_value_rank, {"kv_b_proj": keys_and_values}, True
    elif not shape.fuses_qkv:
        yield (
            hidden,
            {"q_proj": shape.query_width, "k_proj": shape.key_value_width, "v_proj": shape.value_width},
            True,
        )
    yield shape.output_width, {"o_proj": hidden}, False
    if not kind.has_experts:
        if not shape.fuses_gate_up:
            yield hidden, {"gate_proj": shape.ffn_size, "up_proj": shape.ffn_size}, True
        yield shape.ffn_size, {"down_proj": hidden}, False


def num_parameters(shape: ModelShape, config: AdapterConfig) -> int:
    """Elements of all A and B of a model."""
    total = 0
    for kind, num_layers in shape.layers_between(0, shape.num_layers):
        for layer in adapted_layers(shape, config.targets, kind):
            total += num_layers * config.rank * sum(layer.inputs + width for width in layer.outputs)
    return total
