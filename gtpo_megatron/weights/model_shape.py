"""The sizes of a model, dense or mixture of experts, and how many parameters they make."""

import functools
import math
from collections import Counter
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from gtpo_megatron.config.checks import divisors
from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.weights.experts import Experts


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttention:
    """Multi-latent attention (arXiv 2405.04434): heads are made of vectors of low rank that all of them share.

    Attributes:
        query_rank: elements of the vector that queries are made of; None: they are made of the hidden state.
        key_value_rank: elements of the vector that keys and values are made of.
        rotated_size: elements of every head's query and key that are rotated, the last ones; all heads have one key's.
        value_size: elements of every head's value.
    """

    query_rank: int | None
    key_value_rank: int
    rotated_size: int
    value_size: int

    @property
    def cached_size(self) -> int:
        """Elements that a sampler keeps of a token and layer, for all heads."""
        return self.key_value_rank + self.rotated_size


NormPlacement = Literal["pre", "post", "sandwich"]
"""Where a layer has RMSNorms: before attention and MLP, behind both, or before and behind."""


class LayerKind(NamedTuple):
    """What a layer of the decoder has in the place of attention, and in the place of a dense MLP."""

    has_delta_net: bool = False
    has_experts: bool = False


LayerCounts: TypeAlias = tuple[tuple[LayerKind, int], ...]
"""How many layers are of each kind that there is, in the kinds' order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaNet:
    """Gated delta nets (arXiv 2412.06464) in the place of some layers' attention.

    A value head has a matrix ``S``, of which a token forgets a part, corrects what it says of the token's key, and
    reads what it says of the token's query: ``S_t = a_t S_{t-1} + b_t k_t (v_t - (a_t S_{t-1})^T k_t)^T``, ``o_t =
    S_t^T q_t`` (Eq. 10). Neighbouring value heads share a key head, and queries have as many heads as keys.

    Attributes:
        num_key_heads: heads of queries, and of keys.
        num_value_heads: a multiple.
        key_size: elements of a head's query and key: rows of ``S``.
        value_size: size of a head's value: columns of ``S``.
        conv_size: tokens that each element of query, key and value is convolved over, the token and those before.
        layers: per layer of the model whether it has a delta net; the others have attention.
        has_parts_apart: its folder has queries, keys, values, gates and rates one below the other, in four tensors;
            else key head after key head in two.
    """

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    conv_size: int
    layers: tuple[bool, ...]
    has_parts_apart: bool = False

    @property
    def key_width(self) -> int:
        """Columns of all queries, and of all keys."""
        return self.num_key_heads * self.key_size

    @property
    def value_width(self) -> int:
        """Columns of all values, and of all gates of outputs."""
        return self.num_value_heads * self.value_size

    @property
    def conv_width(self) -> int:
        """Elements that are convolved."""
        return 2 * self.key_width + self.value_width

    @property
    def state_size(self) -> int:
        """Elements of all heads' ``S``."""
        return self.num_value_heads * self.key_size * self.value_size

    def matrices(self, hidden_size: int, tensor: int) -> list[int]:
        """Elements of each matrix on one of so many tensor-parallel ranks.

        What makes ``a`` and ``b``, which is whole on each; what makes queries, keys, values and gates of outputs; their
        convolutions; the output.
        """
        projected, output = (self.conv_width + self.value_width) * hidden_size, self.value_width * hidden_size
        convolutions = [width * self.conv_size for width in (self.key_width, self.key_width, self.value_width)]
        rates = 2 * self.num_value_heads * hidden_size
        return [rates, *(elements // tensor for elements in (projected, *convolutions, output))]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A decoder-only transformer with grouped-query or multi-latent attention, RMSNorm and gated MLPs.

    Attributes:
        num_query_groups: key-value heads; with latents as many as heads.
        ffn_size: width of the gated MLP.
        head_size: elements of a head's query and of its key.
        max_positions: longest sequence that the rotary embedding is meant for.
        tied_embeddings: the output layer is the embedding.
        qkv_bias: query, key and value projections have a bias.
        has_sinks: the output projection has a bias, too, and every head a sink: a learned number whose exponential is
            added to the softmax's sum, and so to no value.
        norm_placement: where a layer has its norms.
        qk_norm: every head's query and key pass an RMSNorm.
        qk_norm_spans_heads: that norm is over all heads at once, with a factor for each of their elements.
        has_output_gate: the output of every head's attention is multiplied by the sigmoid of a gate as wide, which is
            made as queries are.
        fuses_qkv: query, key and value are one tensor of its folder.
        fuses_gate_up: the gate and up projections of the MLP are one tensor of its folder.
        delta: gated delta net in the place of some layers' attention; None: every layer has attention.
        latents: sizes of multi-latent attention; None for grouped-query attention.
        windows: for every layer the tokens that a token attends to, itself and those right before it; 0: all, and all
            other numbers are equal. Empty if no layer has a window.
        experts: experts in the place of some layers' MLP; None for a dense model.
    """

    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_query_groups: int
    head_size: int
    vocab_size: int
    max_positions: int
    tied_embeddings: bool = False
    qkv_bias: bool = False
    has_sinks: bool = False
    norm_placement: NormPlacement = "pre"
    qk_norm: bool = False
    qk_norm_spans_heads: bool = False
    has_output_gate: bool = False
    fuses_qkv: bool = False
    fuses_gate_up: bool = False
    delta: DeltaNet | None = None
    latents: LatentAttention | None = None
    windows: tuple[int, ...] = ()
    experts: Experts | None = None

    @property
    def query_width(self) -> int:
        """Columns of all query heads."""
        return self.num_heads * self.head_size

    @property
    def key_value_width(self) -> int:
        """Columns of all keys."""
        return self.num_query_groups * self.head_size

    @property
    def value_width(self) -> int:
        """Columns of all values."""
        return self.num_query_groups * self._value_size

    @property
    def output_width(self) -> int:
        """Columns of all heads' outputs."""
        return self.num_heads * self._value_size

    @property
    def norms_per_layer(self) -> int:
        """Norms of hidden states in a layer."""
        return 4 if self.norm_placement == "sandwich" else 2

    @property
    def qk_norm_sizes(self) -> tuple[int, ...]:
        """Factors of the queries' norm and of the keys'."""
        if not self.qk_norm:
            return ()
        return (self.query_width, self.key_value_width) if self.qk_norm_spans_heads else (self.head_size,) * 2

    @property
    def _value_size(self) -> int:
        return self.head_size if self.latents is None else self.latents.value_size

    @property
    def exchanges_heads(self) -> bool:
        """Whether context-parallel ranks share heads instead of keys and values.

        A delta net reads a sequence from its beginning, and Transformer Engine's ring has no windows and no sinks.
        """
        return any(self.windows) or self.has_sinks or self.delta is not None

    @property
    def has_equal_layers(self) -> bool:
        """Whether all layers have the same parameters; of such Megatron's checkpoints stack the layers."""
        return self.delta is None and (self.experts is None or all(self.experts.layers))

    def has_delta_net(self, layer: int) -> bool:
        """Whether a layer has a delta net in the place of attention."""
        return self.delta is not None and self.delta.layers[layer]

    @property
    def num_expert_layers(self) -> int:
        """Layers that have experts in the place of a dense MLP."""
        return 0 if self.experts is None else sum(self.experts.layers)

    @property
    def num_attention_layers(self) -> int:
        """Layers that have no delta net in the place of attention."""
        return self.num_layers - (0 if self.delta is None else sum(self.delta.layers))

    def common_parameters(self, kind: LayerKind) -> int:
        """Parameters of a layer that every token passes: all but its experts'."""
        mlp = self.shared_parameters if kind.has_experts else self.dense_mlp_parameters
        return sum(self.attention_tensors(kind, 1)) + mlp

    def attention_weights(self, kind: LayerKind) -> int:
        """Elements of a layer's attention or delta net that a token is multiplied with: without biases and norms."""
        if kind.has_delta_net and self.delta is not None:
            return sum(self.delta.matrices(self.hidden_size, 1))
        return sum(self._attention_matrices(1))

    def attention_tensors(self, kind: LayerKind, tensor: int) -> list[int]:
        """Elements of each tensor of a layer that is not its MLP's, on one of so many tensor-parallel ranks.

        Projections, biases and inner norms of its attention or delta net, and the norms of the layer.
        """
        hidden = self.hidden_size
        vectors = [hidden] * self.norms_per_layer
        if kind.has_delta_net and self.delta is not None:
            heads = self.delta.num_value_heads // tensor
            return [*vectors, heads, heads, self.delta.value_size, *self.delta.matrices(hidden, tensor)]
        if self.qkv_bias:
            vectors.append((self.query_width + 2 * self.key_value_width) // tensor)
        if self.has_sinks:
            vectors += [hidden, self.num_heads // tensor]
        vectors += self.qk_norm_sizes
        if self.latents is not None:
            vectors.append(self.latents.key_value_rank)
            if self.latents.query_rank is not None:
                vectors.append(self.latents.query_rank)
        return [*vectors, *self._attention_matrices(tensor)]

    def _attention_matrices(self, tensor: int) -> list[int]:
        """Elements of each matrix of attention, as above; projections to latents are whole on every rank."""
        hidden, latents = self.hidden_size, self.latents
        output = self.output_width // tensor * hidden
        if latents is None:
            query_width = (2 if self.has_output_gate else 1) * self.query_width
            return [(query_width + 2 * self.key_value_width) // tensor * hidden, output]
        query = [self.query_width // tensor * (latents.query_rank or hidden)]
        if latents.query_rank is not None:
            query.append(latents.query_rank * hidden)
        keys_and_values = self.num_heads * (self.head_size - latents.rotated_size + latents.value_size)
        return [*query, latents.cached_size * hidden, keys_and_values // tensor * latents.key_value_rank, output]

    def cached_elements(self, workers: int) -> int:
        """Elements that each of a sampler's so many workers keeps of a token: all layers' keys and values, or latents.

        Key-value heads are copied if workers outnumber them; the latent is whole on every worker.
        """
        return self.num_attention_layers * self._cached_by_layer(workers)

    def cache_block(self, workers: int, unit: int, *, state_width: int = 1) -> int:
        """Tokens of a block of vLLM's cache: the least multiple of ``unit`` with room for a delta net's state.

        vLLM's blocks are all of one size. One of a delta net holds, for a sequence of any length, its share of ``S``
        and of the ``conv_size - 1`` columns before the next token.

        Args:
            workers: workers of the engine.
            unit: tokens of a block without delta nets.
            state_width: bytes of an element of ``S`` over those of a key's.
        """
        if self.delta is None:
            return unit
        columns = (self.delta.conv_size - 1) * self.delta.conv_width
        state = (self.delta.state_size * state_width + columns) // workers
        return unit * -(-state // (unit * self._cached_by_layer(workers)))

    @property
    def state_blocks(self) -> int:
        """Blocks of all attention layers together whose room the states of one sequence take."""
        delta_layers = self.num_layers - self.num_attention_layers
        return -(-delta_layers // self.num_attention_layers)

    def _cached_by_layer(self, workers: int) -> int:
        """Elements of one layer with attention; see ``cached_elements``."""
        if self.latents is not None:
            return self.latents.cached_size
        return 2 * max(1, self.num_query_groups // workers) * self.head_size

    @property
    def dense_mlp_parameters(self) -> int:
        """Parameters of the MLP of a layer without experts."""
        return 3 * self.hidden_size * self.ffn_size

    @property
    def expert_parameters(self) -> int:
        """Parameters of one expert; 0 for a dense model."""
        if self.experts is None:
            return 0
        biases = 2 * self.experts.ffn_size + self.hidden_size if self.experts.clamp else 0
        return 3 * self.hidden_size * self.experts.ffn_size + biases

    @property
    def shared_parameters(self) -> int:
        """Parameters of a layer's router, shared expert and its gate, which every token passes.

        The expert bias is a buffer.
        """
        if self.experts is None:
            return 0
        bias = self.experts.num_experts if self.experts.clamp else 0
        columns = self.experts.num_experts + 3 * self.experts.shared_ffn_size + self.experts.has_shared_gate
        return self.hidden_size * columns + bias

    @property
    def embedding_parameters(self) -> int:
        """Parameters of embedding and output layer, without vocabulary padding."""
        return (1 if self.tied_embeddings else 2) * self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, without vocabulary padding."""
        return self._parameters_with(0 if self.experts is None else self.experts.num_experts)

    @property
    def num_active_parameters(self) -> int:
        """Parameters that a token passes through: only the experts that it is sent to count."""
        return self._parameters_with(0 if self.experts is None else self.experts.experts_per_token)

    def layers_between(self, first: int, last: int) -> LayerCounts:
        """How many of the layers ``first`` to ``last - 1`` are of each kind that there is among them."""
        nothing = (False,) * self.num_layers
        delta = nothing if self.delta is None else self.delta.layers
        experts = nothing if self.experts is None else self.experts.layers
        return _counted(delta[first:last], experts[first:last])

    def check_layout(self, parallel: ParallelConfig) -> None:
        """Raises ConfigError unless heads, key-value heads, MLP, layers, experts and attention can be split so."""
        tensor_parallel_size = parallel.tensor_parallel_size
        split = {"num_query_groups": self.num_query_groups, "num_heads": self.num_heads, "ffn_size": self.ffn_size}
        if self.delta is not None:
            split["the delta nets' num_key_heads"] = self.delta.num_key_heads
        for what, total in split.items():
            if total % tensor_parallel_size:
                raise ConfigError(
                    f"{parallel}: tensor_parallel_size={tensor_parallel_size} must divide {what}={total} of this "
                    f"model; choose from {divisors(math.gcd(*split.values()))}"
                )
        if (problem := parallel.layer_split.problem(self.num_layers)) is not None:
            raise ConfigError(f"{parallel}: {problem}")
        self._check_exchange(parallel)
        if self.experts is not None:
            self.experts.check_layout(parallel)
        elif parallel.expert_parallel_size > 1 or parallel.expert_tensor_parallel_size > 1:
            raise ConfigError(
                f"{parallel}: this model is dense, so expert_parallel_size and expert_tensor_parallel_size must be 1"
            )

    def _check_exchange(self, parallel: ParallelConfig) -> None:
        """Raises ConfigError unless context-parallel ranks can share a tensor-parallel rank's heads evenly."""
        tensor, context = parallel.tensor_parallel_size, parallel.context_parallel_size
        if not self.can_share_context(tensor, context):
            what = "a sliding window" if any(self.windows) else "attention sinks"
            if self.delta is not None:
                what = "gated delta nets"
            raise ConfigError(
                f"{parallel}: context_parallel_size={context} of a model with {what} shares heads, so that times "
                f"tensor_parallel_size={tensor} it must divide "
                f"{' and '.join(f'{name}={total}' for name, total in self._exchanged_heads.items())}; choose from "
                f"{divisors(math.gcd(*self._exchanged_heads.values()) // tensor)}"
            )

    def can_share_context(self, tensor: int, context: int) -> bool:
        """Whether so many context-parallel ranks can share sequences, with so many tensor-parallel ones."""
        return not self.exchanges_heads or not any(
            total % (tensor * context) for total in self._exchanged_heads.values()
        )

    @property
    def _exchanged_heads(self) -> dict[str, int]:
        found = {"num_query_groups": self.num_query_groups}
        return found if self.delta is None else {**found, "the delta nets' num_key_heads": self.delta.num_key_heads}

    def _parameters_with(self, num_experts: int) -> int:
        """Parameters of a model with ``num_experts`` experts in each of its MoE layers."""
        layers = sum(
            count * (self.common_parameters(kind) + kind.has_experts * num_experts * self.expert_parameters)
            for kind, count in self.layers_between(0, self.num_layers)
        )
        return layers + self.embedding_parameters + self.hidden_size


@functools.cache  # a plan asks for the same few stages some hundred thousand times
def _counted(delta: tuple[bool, ...], experts: tuple[bool, ...]) -> LayerCounts:
    return tuple(sorted(Counter(map(LayerKind, delta, experts)).items()))
