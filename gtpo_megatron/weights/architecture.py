"""The shape of a model, read from the ``config.json`` of a Hugging Face folder."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gtpo_megatron.config.checks import divisors
from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.errors import ConfigError

VOCAB_MULTIPLE = 128
"""Megatron's vocabulary is padded to a multiple of this times the tensor-parallel size on a GPU, for tiled matmuls."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the context of pre-training; ``actor/rotary.py`` has the formula.

    Attributes:
        kind: ``linear`` divides every frequency by ``factor``; ``llama3`` divides the slow ones only.
        factor: at least 1.
        low_freq_factor: llama3: frequencies with fewer turns than this over the original context are divided.
        high_freq_factor: llama3: frequencies with more turns than this stay; between the two it is interpolated.
        original_positions: llama3: context of pre-training, in tokens.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """What both Megatron and the name tables need to know of a decoder-only transformer.

    Attributes:
        family: key of the name table.
        num_query_groups: key-value heads.
        ffn_size: width of the gated MLP.
        tied_embeddings: the output layer is the embedding.
        qkv_bias: query, key and value projections have a bias.
        qk_norm: every head's query and key pass an RMSNorm.
        rope_theta: base of the rotary embedding.
        rope_scaling: of its frequencies; None where they are as they were in pre-training.
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
    qk_norm: bool = False
    rope_scaling: RopeScaling | None = None

    def padded_vocab_size(self, tensor_parallel_size: int, multiple: int = 1) -> int:
        """Rows of Megatron's embedding over all ranks: the next multiple of ``tensor_parallel_size * multiple``."""
        unit = tensor_parallel_size * multiple
        return -(-self.vocab_size // unit) * unit

    def check_layout(self, parallel: ParallelConfig) -> None:
        """Raises ConfigError unless heads, key-value heads, MLP and layers split evenly."""
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
        stages = parallel.pipeline_parallel_size * parallel.virtual_pipeline_size
        if self.num_layers % stages:
            raise ConfigError(
                f"{parallel}: pipeline_parallel_size x virtual_pipeline_size = {stages} must divide "
                f"num_layers={self.num_layers} of this model; choose a product from {divisors(self.num_layers)}"
            )


@dataclass(frozen=True, slots=True)
class _Family:
    """What a Hugging Face class says of a model that its ``config.json`` need not.

    Attributes:
        table: key of the name table.
        qkv_bias: as in ``Architecture``.
        qk_norm: as in ``Architecture``.
        head_size: where ``config.json`` has no ``head_dim``; 0 for the hidden size over the heads.
    """

    table: str
    qkv_bias: bool = False
    qk_norm: bool = False
    head_size: int = 0


_FAMILIES = {
    "Qwen2ForCausalLM": _Family("qwen2", qkv_bias=True),
    "Qwen3ForCausalLM": _Family("qwen3", qk_norm=True, head_size=128),
    "LlamaForCausalLM": _Family("llama"),
}
"""DeepSeek-R1 distillations are of the class they were distilled into."""

_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")

_UNSUPPORTED = (
    ("use_sliding_window", "train with full attention"),
    ("quantization_config", "give the folder of the unquantized model"),
    ("attention_bias", "no name table has a bias on the output projection"),
    ("mlp_bias", "no name table has biases in the MLP"),
)
"""Keys of ``config.json`` that must be absent or off, and why or what to do."""


def read_architecture(folder: Path) -> Architecture:
    """Reads ``config.json``.

    Raises:
        ConfigError: no such folder or file, an architecture without a name table, or a feature that is not supported.
    """
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"model.path={folder}: no readable config.json ({error.strerror}); give a model folder"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected an object, got {type(raw).__name__}")
    family = _family(path, raw)
    try:
        _refuse_unsupported(path, raw)
        return _architecture(raw, family)
    except ConfigError:
        raise
    except KeyError as error:
        raise ConfigError(f"{path}: lacks {error}") from error
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(f"{path}: a value of the wrong kind: {error}") from error


def _family(path: Path, raw: dict[str, Any]) -> _Family:
    names = raw.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else "none"
    found = [key for key in _EXPERT_KEYS if raw.get(key)]
    if found:
        raise ConfigError(
            f"{path}: architecture {name!r} is a mixture of experts ({found[0]}={raw[found[0]]}), which cannot be "
            f"trained or converted yet; only the memory planner knows it; train a dense model: {', '.join(_FAMILIES)}"
        )
    if name not in _FAMILIES:
        raise ConfigError(f"{path}: architecture {name!r} has no name table; known: {', '.join(_FAMILIES)}")
    return _FAMILIES[name]


def _refuse_unsupported(path: Path, raw: dict[str, Any]) -> None:
    for key, remedy in _UNSUPPORTED:
        if raw.get(key):
            shown = f"{key}=true" if raw[key] is True else key
            raise ConfigError(f"{path}: {shown} is not supported; {remedy}")
    if raw.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"{path}: hidden_act={raw['hidden_act']!r} is not supported; expected 'silu'")
    kinds = sorted(set(raw.get("layer_types") or ()) - {"full_attention"})
    if kinds:
        raise ConfigError(f"{path}: layer_types has {kinds[0]!r}, which is not supported; expected 'full_attention'")
    rope = _rope(raw)
    if rope["rope_type"] not in ("default", "linear", "llama3"):
        raise ConfigError(
            f"{path}: rope type {rope['rope_type']!r} is not supported; expected 'default', 'linear' or 'llama3'"
        )
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(f"{path}: partial_rotary_factor={rope['partial_rotary_factor']} is not supported; expected 1")


def _rope(raw: dict[str, Any]) -> dict[str, Any]:
    """The rotary embedding's parameters in today's spelling.

    Transformers 5 writes ``rope_parameters`` with everything in it; 4 wrote ``rope_theta`` beside ``rope_scaling``,
    which called its kind ``type`` at first.
    """
    written = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(written, dict):
        raise TypeError(f"rope parameters {written!r}, expected an object")
    rope = dict(written)
    rope.setdefault("rope_type", rope.get("type", "default"))
    rope.setdefault("rope_theta", raw.get("rope_theta", 10000.0))
    if "partial_rotary_factor" in raw:
        rope.setdefault("partial_rotary_factor", raw["partial_rotary_factor"])
    return rope


def _rope_scaling(rope: dict[str, Any], max_positions: int) -> RopeScaling | None:
    if rope["rope_type"] == "default":
        return None
    if rope["rope_type"] == "linear":
        return RopeScaling(kind="linear", factor=float(rope["factor"]))
    return RopeScaling(
        kind="llama3",
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_positions=int(rope.get("original_max_position_embeddings", max_positions)),
    )


def _architecture(raw: dict[str, Any], family: _Family) -> Architecture:
    heads, hidden = int(raw["num_attention_heads"]), int(raw["hidden_size"])
    max_positions, rope = int(raw["max_position_embeddings"]), _rope(raw)
    return Architecture(
        family=family.table,
        num_layers=int(raw["num_hidden_layers"]),
        hidden_size=hidden,
        ffn_size=int(raw["intermediate_size"]),
        num_heads=heads,
        num_query_groups=int(raw.get("num_key_value_heads") or heads),
        head_size=int(raw.get("head_dim") or family.head_size or hidden // heads),
        vocab_size=int(raw["vocab_size"]),
        max_positions=max_positions,
        norm_eps=float(raw["rms_norm_eps"]),
        rope_theta=float(rope["rope_theta"]),
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        rope_scaling=_rope_scaling(rope, max_positions),
    )
