"""The architecture of a model: its shape, and all else by which Megatron and the name tables know it."""

from dataclasses import dataclass, field, replace
from typing import Literal

from gtpo_megatron.weights.model_shape import ModelShape
from gtpo_megatron.weights.rope import RopeScaling

VOCAB_MULTIPLE = 128
"""Megatron's vocabulary is padded to a multiple of this times the tensor-parallel size on a GPU, for tiled matmuls."""


@dataclass(frozen=True, slots=True)
class LocalRope:
    """The rotary embedding of layers that have another one than the model's, unscaled.

    Attributes:
        theta: base of its frequencies.
        layers: per layer of the model whether it has this one.
    """

    theta: float
    layers: tuple[bool, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture(ModelShape):
    """Describes a decoder-only transformer to Megatron and the name tables, besides its shape.

    Attributes:
        family: name of the family, by which ``LAYER_TABLES`` has its rows.
        norm_eps: added to the mean square in an RMSNorm.
        rope_theta: base of the rotary embedding.
        rope_scaling: scaling of the rotary frequencies; None if they are as in pre-training.
        rotary_fraction: share of every head's elements that is rotated, the first ones, or with latents the last ones;
            the frequencies are those of a head of ``rotary_size`` elements. Megatron calls it ``rotary_percent``.
        rotates_neighbours: elements 0 and 1 of a head are rotated together, then 2 and 3; else element 0 with the first
            of the second half of those that are rotated.
        unrotated_layers: numbers of the layers in which nothing is rotated.
        local_rope: rotary embedding of some of the layers; None: all have the same one.
        norms_rotated_heads: queries and keys pass their norms behind the rotation, not before it.
        norms_from_one: the factor of a norm is ``1 + w``, but for that inside a delta net.
        activation: of the MLP's gate; GELU by its approximation with tanh. gpt-oss has one of its own.
        score_scale: factor on the products of queries and keys; None: one over the root of ``head_size``.
        embedding_factor: multiplies what the first layer is given.
        residual_factor: multiplies what attention and MLP add to the hidden states.
        logit_factor: multiplies the logits.
        is_quantized: the folder has quantized weights, which are read as bfloat16; of no meaning for the model.
        also_sees: the folder has other parts than this text part; of no meaning for it.
        asks_for_chunks: the folder asks vLLM to attend in chunks beyond the original context, which transformers does
            not; an engine is started without that.
    """

    family: str
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    rotary_fraction: float = 1.0
    rotates_neighbours: bool = False
    unrotated_layers: tuple[int, ...] = ()
    local_rope: LocalRope | None = None
    norms_rotated_heads: bool = False
    norms_from_one: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    score_scale: float | None = None
    embedding_factor: float = 1.0
    residual_factor: float = 1.0
    logit_factor: float = 1.0
    is_quantized: bool = field(default=False, compare=False)
    also_sees: bool = field(default=False, compare=False)
    asks_for_chunks: bool = field(default=False, compare=False)

    @property
    def rotary_size(self) -> int:
        """Elements of every head that are rotated."""
        return int(self.head_size * self.rotary_fraction) if self.latents is None else self.latents.rotated_size

    @property
    def positions_said(self) -> str:
        """``max_positions`` with where it is from, for messages."""
        scaling = self.rope_scaling
        if scaling is not None and scaling.factor > 1 and self.max_positions == scaling.original_positions:
            return f"original_max_position_embeddings={self.max_positions}, beyond which queries grow with the position"
        if scaling is None or scaling.kind != "yarn":
            return f"max_position_embeddings={self.max_positions}"
        return (
            f"{self.max_positions} positions with YaRN (original_max_position_embeddings="
            f"{scaling.original_positions} times factor={scaling.factor:g})"
        )

    def for_sequences(self, num_tokens: int) -> "Architecture":
        """The architecture of a policy that takes sequences of up to ``num_tokens``.

        Beyond LongRoPE's original context every sequence has the long factors, as in a vLLM engine of this length; a
        cache of keys could not outlast a change. Transformers has them from the sequence on that is longer.
        """
        scaling = self.rope_scaling
        if scaling is None or not scaling.long_factors or num_tokens <= scaling.original_positions:
            return self
        return replace(self, rope_scaling=replace(scaling, is_long=True))

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts; the others have a dense MLP."""
        return self.experts is not None and self.experts.layers[layer]

    def padded_vocab_size(self, tensor_parallel_size: int, multiple: int = 1) -> int:
        """Rows of Megatron's embedding over all ranks: the next multiple of ``tensor_parallel_size * multiple``."""
        unit = tensor_parallel_size * multiple
        return -(-self.vocab_size // unit) * unit
