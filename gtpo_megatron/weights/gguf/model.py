"""What a GGUF file's header says of its model, as ``config.json`` of a Hugging Face folder says it."""

import math
import struct
from pathlib import Path
from typing import Any

from gtpo_megatron.errors import ConfigError
from gtpo_megatron.untrusted.fields import Fields
from gtpo_megatron.untrusted.text import printable, shown
from gtpo_megatron.weights.architecture import Architecture
from gtpo_megatron.weights.config_json import architecture_of
from gtpo_megatron.weights.gguf.header import Header

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""``general.architecture`` -> class of transformers."""

STRETCHED = "rope_freqs.weight"
"""Tensor of Llama 3.1 and later: what every rotary frequency is divided by."""

_F32 = 0
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Of every Llama from 3.1 on; the file has only what they make, and ``factor`` is the largest of it."""


def model_config(header: Header) -> dict[str, Any]:
    """The content of ``config.json``, without a dtype.

    Raises:
        ConfigError: an architecture that is not converted, a mixture of experts, or rotary positions that the file does
            not say enough about; the message names it.
    """
    place = printable(header.path)
    fields = Fields(dict(header.keys), place, ConfigError)
    name = fields.get("general.architecture", str)
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"{place}: architecture {shown(name)} is not converted; known: {', '.join(ARCHITECTURES)}, dense models"
        )

    def size(key: str, default: int | None = None) -> int:
        return fields.get(f"{name}.{key}", int, default, at_least=1, at_most=1 << 31)

    if fields.get(f"{name}.expert_count", int, 0):
        raise ConfigError(f"{place}: architecture {shown(name)} with experts is not converted; dense models are")
    heads, hidden = size("attention.head_count"), size("embedding_length")
    even = max(1, hidden // heads)  # absent keys are what llama.cpp takes them for
    head_size, value_size = size("attention.key_length", even), size("attention.value_length", even)
    rotated = size("rope.dimension_count", head_size)
    if not rotated == head_size == value_size:
        raise ConfigError(
            f"{place}: {rotated} of the {head_size} elements of a head are rotated, and values have {value_size}; "
            f"models are converted where the three are equal"
        )
    if head_size % 2:
        raise ConfigError(f"{place}: a head has {head_size} elements, which cannot be rotated in pairs")
    config = {
        "architectures": [ARCHITECTURES[name]],
        "model_type": name,
        "vocab_size": _vocab_size(header),
        "hidden_size": hidden,
        "intermediate_size": size("feed_forward_length"),
        "num_hidden_layers": size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": size("attention.head_count_kv", heads),
        "head_dim": head_size,
        "hidden_act": "silu",
        "max_position_embeddings": size("context_length"),
        "rms_norm_eps": fields.get(f"{name}.attention.layer_norm_rms_epsilon", float, at_least=0),
        "rope_parameters": _rope(header, fields, name, head_size),
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }
    return config | special_ids(header)


def model_architecture(header: Header) -> Architecture:
    """The architecture of the model, as its converted folder will have it; raises as :func:`model_config` does."""
    return architecture_of(Fields(model_config(header), printable(header.path), ConfigError), header.path)


def special_ids(header: Header) -> dict[str, Any]:
    """``bos_token_id``, ``eos_token_id`` and ``pad_token_id``, as far as the file has them.

    Where an end of the turn is named beside the end of the sequence, both end a response.
    """
    fields = Fields(dict(header.keys), printable(header.path), ConfigError)
    vocab_size = _vocab_size(header)

    def token(name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        return fields.get(key, int, at_least=0, at_most=vocab_size - 1) if fields.has(key) else None

    ends = sorted({one for name in ("eos", "eot") if (one := token(name)) is not None})
    found = {
        "bos_token_id": token("bos"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends,
        "pad_token_id": token("padding"),
    }
    return {name: value for name, value in found.items() if value not in (None, [])}


def _vocab_size(header: Header) -> int:
    """Rows of the embedding; the list of tokens may be shorter."""
    found = header.tensors.get("token_embd.weight")
    if found is None:
        raise ConfigError(f"{printable(header.path)}: has no tensor token_embd.weight; expected a whole language model")
    return found.shape[0]


def _rope(header: Header, fields: Fields, name: str, head_size: int) -> dict[str, Any]:
    """``rope_parameters``."""
    place = printable(header.path)
    theta = fields.get(f"{name}.rope.freq_base", float, 10000.0)
    factors = [fields.get(f"{name}.{key}", float, 1.0) for key in ("rope.scaling.factor", "rope.scale_linear")]
    is_stretched = any(factor not in (0.0, 1.0) for factor in factors)  # llama.cpp takes 0 for 1
    kind = fields.get(f"{name}.rope.scaling.type", str, "linear" if is_stretched else "none")
    if kind != "none" or is_stretched:
        raise ConfigError(
            f"{place}: rotary positions stretched by {shown(kind)} are not converted, as the file does not say what "
            f"the original config.json does; take the original model"
        )
    if STRETCHED not in header.tensors:
        return {"rope_type": "default", "rope_theta": theta}
    found = _floats(header, STRETCHED, head_size // 2)
    factor = max(found)
    factor = float(round(factor)) if math.isfinite(factor) else 0.0
    if (
        not theta > 0
        or factor < 1
        or any(
            not math.isclose(one, expected, rel_tol=1e-5)
            for one, expected in zip(found, _llama3_divisors(theta, factor, head_size), strict=True)
        )
    ):
        raise ConfigError(f"{place}: {STRETCHED} is not that of a Llama 3.1, 3.2 or 3.3; take the original model")
    return {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **_LLAMA3}


def _llama3_divisors(theta: float, factor: float, head_size: int) -> list[float]:
    """What Llama 3.1 divides the rotary frequencies by: 1 where they turn often within the original context."""
    low, high, original = _LLAMA3.values()
    found = []
    for pair in range(head_size // 2):
        turns = original / (2 * math.pi * theta ** (2 * pair / head_size))
        share = min(1.0, max(0.0, (turns - low) / (high - low)))
        found.append(1 / ((1 - share) / factor + share))
    return found


def _floats(header: Header, name: str, count: int) -> tuple[float, ...]:
    stored = header.tensors[name]
    if stored.shape != (count,) or stored.type_id != _F32:
        raise ConfigError(f"{printable(header.path)}: {name} has shape {stored.shape}, expected {count} of float32")
    with Path(header.path).open("rb") as file:
        file.seek(stored.offset)
        content = file.read(4 * count)
    if len(content) < 4 * count:
        raise ConfigError(f"{printable(header.path)}: ends inside {name}; fetch it again")
    return struct.unpack(f"<{count}f", content)
