"""The sizes of a model, dense or mixture of experts, and how many parameters they make."""

import math
from dataclasses import dataclass

from gtpo_megatron.config.checks import divisors
from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.weights.experts import Experts

MAX_SIZE = 1 << 31
"""Of a dimension; no model comes near it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A decoder-only transformer with grouped-query attention, RMSNorm and gated MLPs.

    Attributes:
        num_query_groups: key-value heads.
        ffn_size: width of the gated MLP.
        max_positions: longest sequence that the rotary embedding is meant for.
        tied_embeddings: the output layer is the embedding.
        qkv_bias: query, key and value projections have a bias.
        qk_norm: every head's query and key pass an RMSNorm.
        windows: of every layer, the tokens that a token attends to, itself and those right before it; 0: all, and all
            other numbers are equal. Empty if no layer has a window.
        experts: in the place of some layers' MLP; None for a dense model.
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
    qk_norm: bool = False
    windows: tuple[int, ...] = ()
    experts: Experts | None = None

    @property
    def query_width(self) -> int:
        """Columns of all query heads."""
        return self.num_heads * self.head_size

    @property
    def key_value_width(self) -> int:
        """Columns of all keys; as many of all values."""
        return self.num_query_groups * self.head_size

    @property
    def num_expert_layers(self) -> int:
        """Layers that have experts in the place of a dense MLP."""
        return 0 if self.experts is None else sum(self.experts.layers)

    @property
    def attention_parameters(self) -> int:
        """Parameters of one layer: projections and biases of attention, norms of heads, both norms of the layer."""
        qkv = self.query_width + 2 * self.key_value_width
        matrices = self.hidden_size * (qkv + self.query_width)
        return matrices + qkv * self.qkv_bias + 2 * self.head_size * self.qk_norm + 2 * self.hidden_size

    @property
    def dense_mlp_parameters(self) -> int:
        """Parameters of the MLP of a layer without experts."""
        return 3 * self.hidden_size * self.ffn_size

    @property
    def expert_parameters(self) -> int:
        """Parameters of one expert; 0 for a dense model."""
        return 0 if self.experts is None else 3 * self.hidden_size * self.experts.ffn_size

    @property
    def shared_parameters(self) -> int:
        """Parameters of a layer's router and shared expert, which every token passes; the expert bias is a buffer."""
        if self.experts is None:
            return 0
        return self.hidden_size * (self.experts.num_experts + 3 * self.experts.shared_ffn_size)

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

    def layers_between(self, first: int, last: int) -> tuple[int, int]:
        """How many of the layers ``first`` to ``last - 1`` have a dense MLP, and how many have experts."""
        sparse = 0 if self.experts is None else sum(self.experts.layers[first:last])
        return last - first - sparse, sparse

    def check_layout(self, parallel: ParallelConfig) -> None:
        """Raises ConfigError unless heads, key-value heads, MLP, layers, experts and attention can be split so."""
        tensor_parallel_size = parallel.tensor_parallel_size
        for what, total in (
            ("num_query_groups", self.num_query_groups),
            ("num_heads", self.num_heads),
            ("ffn_size", self.ffn_size),
        ):
            if total % tensor_parallel_size:
                raise ConfigError(
                    f"{parallel}: tensor_parallel_size={tensor_parallel_size} must divide {what}={total} of this "
                    f"model; choose from {divisors(math.gcd(self.num_query_groups, self.num_heads, self.ffn_size))}"
                )
        if (problem := parallel.layer_split.problem(self.num_layers)) is not None:
            raise ConfigError(f"{parallel}: {problem}")
        if any(self.windows) and parallel.context_parallel_size > 1:
            raise ConfigError(
                f"{parallel}: context_parallel_size must be 1 for a model with a sliding window, which Transformer "
                f"Engine's ring does not have"
            )
        if self.experts is not None:
            self.experts.check_layout(parallel)
        elif parallel.expert_parallel_size > 1 or parallel.expert_tensor_parallel_size > 1:
            raise ConfigError(
                f"{parallel}: this model is dense, so expert_parallel_size and expert_tensor_parallel_size must be 1"
            )

    def _parameters_with(self, num_experts: int) -> int:
        """Parameters of a model with ``num_experts`` experts in each of its MoE layers."""
        dense, sparse = self.layers_between(0, self.num_layers)
        return (
            self.num_layers * self.attention_parameters
            + dense * self.dense_mlp_parameters
            + sparse * (self.shared_parameters + num_experts * self.expert_parameters)
            + self.embedding_parameters
            + self.hidden_size
        )
