"""The shape of a model as the planner needs it: dense or mixture of experts, from a folder, or by name."""

from dataclasses import dataclass, fields
from pathlib import Path

from gtpo_megatron.errors import ConfigError
from gtpo_megatron.untrusted.fields import Fields
from gtpo_megatron.weights.architecture import MAX_SIZE, Architecture, model_fields, read_architecture


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """A mixture of experts in the place of every layer's MLP.

    Attributes:
        num_experts: of a layer.
        experts_per_token: how many of them the router sends a token to.
        ffn_size: width of one expert's gated MLP.
    """

    num_experts: int
    experts_per_token: int
    ffn_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A decoder-only transformer with grouped-query attention, RMSNorm and gated MLPs; fields as in ``Architecture``.

    Attributes:
        qk_norm: every head's query and key pass an RMSNorm.
        experts: in the place of the MLP; None for a dense model.
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
    def attention_parameters(self) -> int:
        """Of one layer: projections and their biases, norms of heads, both norms of the layer."""
        qkv = self.query_width + 2 * self.key_value_width
        matrices = self.hidden_size * (qkv + self.query_width)
        return matrices + qkv * self.qkv_bias + 2 * self.head_size * self.qk_norm + 2 * self.hidden_size

    @property
    def mlp_parameters(self) -> int:
        """Of one layer, all experts and the router included."""
        if self.experts is None:
            return 3 * self.hidden_size * self.ffn_size
        per_expert = 3 * self.hidden_size * self.experts.ffn_size
        return self.experts.num_experts * (per_expert + self.hidden_size)

    @property
    def embedding_parameters(self) -> int:
        """Embedding and output layer, without padding."""
        return (1 if self.tied_embeddings else 2) * self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """Of the whole model, vocabulary padding left out."""
        layer = self.attention_parameters + self.mlp_parameters
        return self.num_layers * layer + self.embedding_parameters + self.hidden_size

    @property
    def num_active_parameters(self) -> int:
        """That a token passes through: of the experts only those it is sent to."""
        if self.experts is None:
            return self.num_parameters
        idle = self.experts.num_experts - self.experts.experts_per_token
        return self.num_parameters - self.num_layers * idle * 3 * self.hidden_size * self.experts.ffn_size


def shape_of(arch: Architecture) -> ModelShape:
    """What the planner needs of a model that can be trained."""
    names = [field.name for field in fields(ModelShape) if field.name != "experts"]
    return ModelShape(**{name: getattr(arch, name) for name in names})


def read_shape(folder: Path) -> ModelShape:
    """Reads the ``config.json`` of a folder; no weights are needed.

    Raises:
        ConfigError: no such folder or file, or an architecture that is not known.
    """
    found = model_fields(folder)
    if found.raw.get("architectures") == ["Qwen3MoeForCausalLM"]:
        return _qwen3_moe(folder, found)
    return shape_of(read_architecture(folder))


def _qwen3_moe(folder: Path, found: Fields) -> ModelShape:
    """Every layer has experts; the few models that mix dense layers in are refused."""
    if found.raw.get("mlp_only_layers") or found.get("decoder_sparse_step", int, 1) != 1:
        raise ConfigError(f"{folder}: layers without experts between layers with experts are not planned for")

    def size(name: str) -> int:
        return found.get(name, int, at_least=1, at_most=MAX_SIZE)

    return ModelShape(
        num_layers=size("num_hidden_layers"),
        hidden_size=size("hidden_size"),
        ffn_size=size("intermediate_size"),
        num_heads=size("num_attention_heads"),
        num_query_groups=size("num_key_value_heads"),
        head_size=size("head_dim"),
        vocab_size=size("vocab_size"),
        max_positions=size("max_position_embeddings"),
        tied_embeddings=found.get("tie_word_embeddings", bool, False),
        qk_norm=True,
        experts=Experts(
            num_experts=size("num_experts"),
            experts_per_token=size("num_experts_per_tok"),
            ffn_size=size("moe_intermediate_size"),
        ),
    )
