"""Sizes of a model's low-rank adapters, from its shape alone; free of torch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from gtpo_megatron.config.adapter import ALL_LINEAR, AdapterConfig
from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.weights.model_shape import LayerKind, ModelShape

Split = Literal["rows", "columns", "none"]
"""What tensor-parallel ranks share of a projection's matrix; none: every rank has the whole one."""


@dataclass(frozen=True, slots=True)
class AdaptedLayer:
    """A linear layer of Megatron's that can have adapters.

    Attributes:
        inputs: over all ranks.
        outputs: outputs of each of its projections by name, over all ranks: several where a tensor of the folder holds
            several matrices, which ranks share one by one, and which have one A.
        split: of all its projections.
        num_experts: experts of the decoder layer, each of which has one; 0: it is no expert's.
        travels_alone: vLLM has a layer for its A and B.
    """

    inputs: int
    outputs: Mapping[str, tuple[int, ...]]
    split: Split
    num_experts: int = 0
    travels_alone: bool = True

    def chosen(self, targets: Sequence[str]) -> "AdaptedLayer":
        """Of its projections those that are targets."""
        outputs = {name: blocks for name, blocks in self.outputs.items() if name in targets}
        return replace(self, outputs=outputs)

    def num_parameters(self, rank: int) -> int:
        """Elements of A and B of one copy."""
        return rank * sum(self.inputs + sum(blocks) for blocks in self.outputs.values())


def targets_of(shape: ModelShape, config: AdapterConfig) -> tuple[str, ...]:
    """The projections that are to have adapters, by name, in the model's order.

    Raises:
        ConfigError: a target is no projection that this model has.
    """
    every = {name: layer for layer in _every_layer(shape) for name in layer.outputs}
    if unknown := [target for target in config.targets if target not in {*every, ALL_LINEAR}]:
        raise ConfigError(
            f"adapter.targets={config.targets!r}: {unknown[0]} is no projection of this model that can have adapters; "
            f"it has {', '.join(every)}, and {ALL_LINEAR} is all but those of experts"
        )
    takes_all = ALL_LINEAR in config.targets
    return tuple(
        name for name, layer in every.items() if name in config.targets or (takes_all and not layer.num_experts)
    )


def check_adaptable(shape: ModelShape, config: AdapterConfig) -> None:
    """Checks that a model can have these adapters.

    Raises:
        ConfigError: a target is no projection that can, or none that vLLM can add adapters to where these travel alone;
            or the rank exceeds what any of them can have.
    """
    if not config.is_on:
        return
    targets = targets_of(shape, config)
    layers = [(name, layer) for layer in _every_layer(shape) for name in layer.outputs]
    if config.pushes_alone:
        _check_alone(config, targets, layers)
    sides = {name: min(layer.inputs, sum(layer.outputs[name])) for name, layer in layers if name in targets}
    widest = max(sides, key=lambda name: sides[name])
    if config.rank > sides[widest]:
        raise ConfigError(
            f"adapter.rank={config.rank} exceeds {sides[widest]}, the smaller side of {widest} and the largest of all "
            f"targets: no product has a higher rank; use {sides[widest]} or less"
        )


def check_shared(shape: ModelShape, config: AdapterConfig, parallel: ParallelConfig) -> None:
    """Raises ConfigError if ranks are to share frozen weights, and no two of them have the same ones."""
    replicas = parallel.data_parallel_size * parallel.context_parallel_size
    of_experts = 1 if shape.experts is None else parallel.expert_data_parallel_size
    if config.shard_frozen and max(replicas, of_experts) == 1:
        raise ConfigError(
            f"adapter.shard_frozen=True with {parallel}: no two ranks have the same weights, of which each could keep "
            f"a part; leave it out, or use fewer tensor- or pipeline-parallel ranks"
        )


def _check_alone(config: AdapterConfig, targets: Sequence[str], layers: Sequence[tuple[str, AdaptedLayer]]) -> None:
    if "kv_b_proj" in config.targets:
        raise ConfigError(
            f"adapter.targets={config.targets!r} with adapter.push='adapters': vLLM multiplies kv_b_proj into other "
            f"weights, where its adapters have no effect; use push='merged', or leave it out"
        )
    merged = {name for name, layer in layers if not layer.travels_alone or name == "kv_b_proj"}
    if found := [name for name in targets if name in merged]:
        rest = " ".join(dict.fromkeys(name for name, _ in layers if name not in merged))
        raise ConfigError(
            f"adapter.targets={config.targets!r} with adapter.push='adapters': adapters of {found[0]} travel merged "
            f"into its weights only; use push='merged'" + (f", or --adapter.targets {rest}" if rest else "")
        )


def adapted_layers(shape: ModelShape, config: AdapterConfig, kind: LayerKind) -> Iterator[AdaptedLayer]:
    """The linear layers of a decoder layer that have adapters, with those of their projections that are targets.

    Args:
        shape: shape of the model.
        config: configuration of the adapters.
        kind: kind of the decoder layer.
    """
    targets = targets_of(shape, config)
    for layer in _layers(shape, kind):
        if (chosen := layer.chosen(targets)).outputs:
            yield chosen


def _every_layer(shape: ModelShape) -> list[AdaptedLayer]:
    """Of every kind of the model's decoder layers."""
    return [layer for kind, _ in shape.layers_between(0, shape.num_layers) for layer in _layers(shape, kind)]


def _layers(shape: ModelShape, kind: LayerKind) -> Iterator[AdaptedLayer]:
    """The linear layers of a decoder layer that can have adapters."""
    yield from _delta_net(shape) if kind.has_delta_net else _attention(shape)
    if shape.experts is None:
        yield from _mlp(shape)
    elif kind.has_experts:  # of shared ones and of dense layers peft has none: it takes their names for the experts'
        hidden, width, count = shape.hidden_size, shape.experts.ffn_size, shape.experts.num_experts
        yield AdaptedLayer(hidden, {"experts.gate_up_proj": (width, width)}, "none", count, travels_alone=False)
        yield AdaptedLayer(width, {"experts.down_proj": (hidden,)}, "none", count, travels_alone=False)


def _attention(shape: ModelShape) -> Iterator[AdaptedLayer]:
    hidden, latents = shape.hidden_size, shape.latents
    query = (1 + shape.has_output_gate) * shape.query_width
    key, value = shape.key_value_width, shape.value_width
    plain = shape.delta is None  # vLLM's class of such models has no adapters
    if latents is not None:
        if latents.query_rank is not None:
            yield AdaptedLayer(hidden, {"q_a_proj": (latents.query_rank,)}, "none", travels_alone=False)
        name = "q_proj" if latents.query_rank is None else "q_b_proj"
        yield AdaptedLayer(latents.query_rank or hidden, {name: (query,)}, "rows")
        yield AdaptedLayer(hidden, {"kv_a_proj_with_mqa": (latents.cached_size,)}, "none", travels_alone=False)
        keys_and_values = shape.num_heads * (shape.head_size - latents.rotated_size + latents.value_size)
        yield AdaptedLayer(latents.key_value_rank, {"kv_b_proj": (keys_and_values,)}, "rows")
    elif shape.fuses_qkv:
        yield AdaptedLayer(hidden, {"qkv_proj": (query, key, value)}, "rows", travels_alone=False)
    else:
        outputs = {"q_proj": (query,), "k_proj": (key,), "v_proj": (value,)}
        yield AdaptedLayer(hidden, outputs, "rows", travels_alone=plain)
    yield AdaptedLayer(shape.output_width, {"o_proj": (hidden,)}, "columns", travels_alone=plain)


def _delta_net(shape: ModelShape) -> Iterator[AdaptedLayer]:
    hidden, delta = shape.hidden_size, shape.delta
    assert delta is not None  # the kind of the layer says so
    keys, values, heads = delta.key_width, delta.value_width, delta.num_value_heads
    if delta.has_parts_apart:
        projected = {"in_proj_qkv": (keys, keys, values), "in_proj_z": (values,)}
        rates = {"in_proj_b": (heads,), "in_proj_a": (heads,)}
    else:
        projected, rates = {"in_proj_qkvz": (2 * (keys + values),)}, {"in_proj_ba": (2 * heads,)}
    yield AdaptedLayer(hidden, projected, "rows", travels_alone=False)
    yield AdaptedLayer(hidden, rates, "none", travels_alone=False)
    yield AdaptedLayer(values, {"out_proj": (hidden,)}, "columns", travels_alone=False)


def _mlp(shape: ModelShape) -> Iterator[AdaptedLayer]:
    hidden, width, plain = shape.hidden_size, shape.ffn_size, shape.delta is None
    if shape.fuses_gate_up:
        yield AdaptedLayer(hidden, {"gate_up_proj": (width, width)}, "rows", travels_alone=False)
    else:
        yield AdaptedLayer(hidden, {"gate_proj": (width,), "up_proj": (width,)}, "rows", travels_alone=plain)
    yield AdaptedLayer(width, {"down_proj": (hidden,)}, "columns", travels_alone=plain)


def num_parameters(shape: ModelShape, config: AdapterConfig, *, active: bool = False) -> int:
    """Elements of all A and B of a model.

    Args:
        shape: shape of the model.
        config: configuration of the adapters.
        active: of experts those that a token is sent to only.
    """
    total = 0
    for kind, num_layers in shape.layers_between(0, shape.num_layers):
        for layer in adapted_layers(shape, config, kind):
            copies = layer.num_experts
            if active and copies and shape.experts is not None:
                copies = shape.experts.experts_per_token
            total += num_layers * max(copies, 1) * layer.num_parameters(config.rank)
    return total
