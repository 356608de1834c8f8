"""The shape of a model, read from the ``config.json`` of a Hugging Face folder."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gtpo_megatron.config.checks import divisors
from gtpo_megatron.errors import ConfigError

VOCAB_MULTIPLE = 128
"""Megatron's vocabulary is padded to a multiple of this times the tensor-parallel size on a GPU, for tiled matmuls."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """What both Megatron and the name tables need to know of a decoder-only transformer.

    Attributes:
        family: key of the name table.
        num_query_groups: key-value heads.
        ffn_size: width of the gated MLP.
        tied_embeddings: the output layer is the embedding.
        qkv_bias: query, key and value projections have a bias.
        rope_theta: base of the rotary embedding.
    """

    family: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_query_groups: int
    head_size: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    tied_embeddings: bool
    qkv_bias: bool

    def padded_vocab_size(self, tensor_parallel_size: int, multiple: int = 1) -> int:
        """Rows of Megatron's embedding over all ranks: the next multiple of ``tensor_parallel_size * multiple``."""
        unit = tensor_parallel_size * multiple
        return -(-self.vocab_size // unit) * unit

    def check_layout(self, tensor_parallel_size: int, pipeline_parallel_size: int) -> None:
        """Raises ConfigError unless heads, key-value heads, MLP and layers split evenly."""
        for what, total in (
            ("num_query_groups", self.num_query_groups),
            ("num_heads", self.num_heads),
            ("ffn_size", self.ffn_size),
        ):
            if total % tensor_parallel_size:
                raise ConfigError(
                    f"tensor_parallel_size={tensor_parallel_size} must divide {what}={total} of this model; "
                    f"choose from {divisors(self.num_query_groups)}"
                )
        if self.num_layers % pipeline_parallel_size:
            raise ConfigError(
                f"pipeline_parallel_size={pipeline_parallel_size} must divide num_layers={self.num_layers}; "
                f"choose from {divisors(self.num_layers)}"
            )


_FAMILIES = {"Qwen2ForCausalLM": ("qwen2", True)}
"""Hugging Face class -> (name table, query/key/value biases)."""


def read_architecture(folder: Path) -> Architecture:
    """Reads ``config.json``.

    Raises:
        ConfigError: no such folder or file, an architecture without a name table, or a feature that is not supported.
    """
    path = folder / "config.json"
    try:
        raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"model.path={folder}: no readable config.json ({error.strerror}); give a model folder"
        ) from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error
    names = raw.get("architectures") or ["none"]
    if names[0] not in _FAMILIES:
        raise ConfigError(f"{path}: architecture {names[0]!r} has no name table; known: {', '.join(_FAMILIES)}")
    if raw.get("use_sliding_window"):
        raise ConfigError(f"{path}: use_sliding_window=true is not supported; train with full attention")
    family, qkv_bias = _FAMILIES[names[0]]
    rope = raw.get("rope_parameters") or {}
    rope_type = rope.get("rope_type", (raw.get("rope_scaling") or {}).get("rope_type", "default"))
    if rope_type != "default":
        raise ConfigError(f"{path}: rope type {rope_type!r} is not supported; expected 'default'")
    try:
        heads, hidden = int(raw["num_attention_heads"]), int(raw["hidden_size"])
        return Architecture(
            family=family,
            num_layers=int(raw["num_hidden_layers"]),
            hidden_size=hidden,
            ffn_size=int(raw["intermediate_size"]),
            num_heads=heads,
            num_query_groups=int(raw.get("num_key_value_heads", heads)),
            head_size=int(raw.get("head_dim") or hidden // heads),
            vocab_size=int(raw["vocab_size"]),
            max_positions=int(raw["max_position_embeddings"]),
            norm_eps=float(raw["rms_norm_eps"]),
            rope_theta=float(rope.get("rope_theta", raw.get("rope_theta", 10000.0))),
            tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=qkv_bias,
        )
    except KeyError as error:
        raise ConfigError(f"{path}: lacks {error}") from error
