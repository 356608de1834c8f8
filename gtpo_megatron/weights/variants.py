"""What some families have that no key of ``config.json`` switches on: each function gives a plain decoder its own.

Arguments of each are where the keys are from, the keys, the decoder so far, and which of its layers have a window.
"""

import math
from dataclasses import replace
from pathlib import Path

from gtpo_megatron.errors import ConfigError
from gtpo_megatron.untrusted.fields import Fields
from gtpo_megatron.untrusted.text import shown
from gtpo_megatron.weights.architecture import Architecture, LocalRope
from gtpo_megatron.weights.rope import ROPE_OF_WINDOWS, rope_by_layer, rope_fields, rope_kind

_MAX_ALPHA = 1e9
"""Published models have 1,000."""


def olmo2(path: Path, fields: Fields, arch: Architecture, windowed: tuple[bool, ...]) -> Architecture:
    """OLMo 2: norms behind attention and MLP, and over all heads."""
    del path, fields, windowed
    return replace(arch, norm_placement="post", qk_norm_spans_heads=True)


def olmo3(path: Path, fields: Fields, arch: Architecture, windowed: tuple[bool, ...]) -> Architecture:
    """OLMo 3: as OLMo 2; the rotary embedding is stretched in layers without a window only."""
    theta = _theta_of_windows(path, fields)
    if theta is None and arch.rope_theta != 500000.0:
        raise ConfigError(
            f"{path}: rope_theta={arch.rope_theta:g} is not supported where rope_parameters does not have it for each "
            f"kind of layer: transformers takes 500000 for those with a window; write rope_parameters"
        )
    return replace(
        olmo2(path, fields, arch, windowed), local_rope=_local_rope(arch, windowed, theta or arch.rope_theta)
    )


def olmoe(path: Path, fields: Fields, arch: Architecture, windowed: tuple[bool, ...]) -> Architecture:
    """OLMoE: norms over all heads."""
    del windowed
    if fields.has("clip_qkv"):
        raise ConfigError(f"{path}: clip_qkv={shown(fields.raw['clip_qkv'])} is not supported; expected null")
    return replace(arch, qk_norm_spans_heads=True)


def exaone4(path: Path, fields: Fields, arch: Architecture, windowed: tuple[bool, ...]) -> Architecture:
    """EXAONE 4: norms behind attention and MLP; where some layers have a window, the others are not rotated."""
    if fields.has("sliding_window") and not any(windowed):
        raise ConfigError(
            f"{path}: sliding_window without a layer of 'sliding_attention' is not supported: transformers rotates no "
            f"layer then, vLLM all of them"
        )
    unrotated = tuple(layer for layer, has_window in enumerate(windowed) if not has_window) if any(windowed) else ()
    return replace(arch, norm_placement="post", unrotated_layers=unrotated)


def glm4(path: Path, fields: Fields, arch: Architecture, windowed: tuple[bool, ...]) -> Architecture:
    """GLM-4-0414: norms before and behind attention and MLP."""
    del path, fields, windowed
    return replace(arch, norm_placement="sandwich")


def gemma(path: Path, fields: Fields, arch: Architecture, windowed: tuple[bool, ...]) -> Architecture:
    """Gemma: norms of ``1 + w``, GELU, an embedding times the root of its width."""
    del windowed
    if fields.get("use_bidirectional_attention", bool, False):
        raise ConfigError(f"{path}: use_bidirectional_attention=true is not supported; expected false")
    return replace(arch, norms_from_one=True, activation="gelu_tanh", embedding_factor=arch.hidden_size**0.5)


def gemma3(path: Path, fields: Fields, arch: Architecture, windowed: tuple[bool, ...]) -> Architecture:
    """Gemma 3: as Gemma, with norms before and behind, scores of their own scale, and two rotary embeddings."""
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if fields.has(key):
            raise ConfigError(f"{path}: {key}={shown(fields.raw[key])} is not supported; expected null")
    if fields.raw.get("sliding_window", 0) is None:
        raise ConfigError(f"{path}: sliding_window=null is not supported; expected a number of tokens")
    theta = _theta_of_windows(path, fields) or fields.get("rope_local_base_freq", float, 10000.0)
    scale = fields.get("query_pre_attn_scalar", float, 256.0)
    if not (theta > 0 and scale > 0):
        raise ConfigError(f"{path}: rotary base {theta:g} and query_pre_attn_scalar={scale:g} must be more than 0")
    return replace(
        gemma(path, fields, arch, windowed),
        norm_placement="sandwich",
        score_scale=scale**-0.5,
        local_rope=_local_rope(arch, windowed, theta),
    )


def hunyuan(path: Path, fields: Fields, arch: Architecture, windowed: tuple[bool, ...]) -> Architecture:
    """Hunyuan: norms of rotated heads; a rotary base that ``alpha`` stretches once and for all."""
    del windowed
    rope = rope_fields(fields)
    theta = arch.rope_theta
    if rope_kind(rope) == "dynamic":
        alpha = rope.get("alpha", float)
        if not (1 <= alpha <= _MAX_ALPHA and arch.head_size > 2):
            raise ConfigError(f"{path}: alpha={alpha:g} of rope type 'dynamic' must lie between 1 and {_MAX_ALPHA:g}")
        theta *= alpha ** (arch.head_size / (arch.head_size - 2))
        if not theta < math.inf:
            raise ConfigError(f"{path}: alpha={alpha:g} makes a rotary base of infinity")
    return replace(arch, norms_rotated_heads=True, rope_theta=theta)


def granite(path: Path, fields: Fields, arch: Architecture, windowed: tuple[bool, ...]) -> Architecture:
    """Granite 3: factors on embedding, scores, residuals and logits."""
    del windowed

    def factor(name: str) -> float:
        if not (found := fields.get(name, float, 1.0)) > 0:
            raise ConfigError(f"{path}: {name}={found:g} must be more than 0")
        return found

    return replace(
        arch,
        score_scale=factor("attention_multiplier"),
        embedding_factor=factor("embedding_multiplier"),
        residual_factor=factor("residual_multiplier"),
        logit_factor=1.0 / factor("logits_scaling"),
    )


def qwen3_5(path: Path, fields: Fields, arch: Architecture, windowed: tuple[bool, ...]) -> Architecture:
    """Qwen3.5: Qwen3-Next's, which it may not switch off, with a delta net's projections one by one."""
    del windowed
    if not fields.get("attn_output_gate", bool, True):
        raise ConfigError(f"{path}: attn_output_gate=false is not supported; expected true")
    assert arch.delta is not None  # the family says so
    return replace(arch, delta=replace(arch.delta, has_parts_apart=True))


def cwm(path: Path, fields: Fields, arch: Architecture, windowed: tuple[bool, ...]) -> Architecture:
    """CWM: nothing but windows in some layers, of which the hub's folders say in which."""
    del windowed
    if fields.raw.get("sliding_window", 0) is not None:
        fields.get("layer_types", list[str])  # the class begins with a layer without
    if not (fields.raw.get("rope_parameters") or fields.raw.get("rope_scaling")):
        raise ConfigError(f"{path}: lacks rope_parameters, of which transformers and vLLM have other defaults")
    return arch


def minimax_m2(path: Path, fields: Fields, arch: Architecture, windowed: tuple[bool, ...]) -> Architecture:
    """MiniMax M2: norms over all heads, of which a part is rotated."""
    del windowed
    rotated = fields.get("rotary_dim", int, at_least=2, at_most=arch.head_size)  # without it vLLM does not start
    if rotated % 2:
        raise ConfigError(f"{path}: rotary_dim={rotated} is not supported; expected an even number")
    fraction = rotated / arch.head_size
    name = "partial_rotary_factor"
    if any(where.has(name) for where in (fields, rope_fields(fields))) and arch.rotary_fraction != fraction:
        raise ConfigError(
            f"{path}: {name}={arch.rotary_fraction:g} and rotary_dim={rotated} of head_dim={arch.head_size} differ"
        )
    return replace(arch, rotary_fraction=fraction, qk_norm_spans_heads=True)


def ministral3(path: Path, fields: Fields, arch: Architecture, windowed: tuple[bool, ...]) -> Architecture:
    """Ministral 3: queries grow with the position beyond the original context, which nothing here does."""
    del windowed
    scaling = arch.rope_scaling
    if scaling is None or scaling.kind != "yarn":
        raise ConfigError(f"{path}: rope type 'yarn' is missing; expected rope_parameters as the hub's folders have it")
    rope_fields(fields).get("llama_4_scaling_beta", float)  # by which they grow
    return replace(arch, max_positions=scaling.original_positions)


def _theta_of_windows(path: Path, fields: Fields) -> float | None:
    """Base of the rotary embedding of layers with a window; None unless ``rope_parameters`` is by kind of layer."""
    rope = rope_by_layer(fields).get(ROPE_OF_WINDOWS)
    if rope is None:
        return None
    if (kind := rope_kind(rope)) != "default":
        raise ConfigError(f"{path}: rope type {shown(kind)} of {ROPE_OF_WINDOWS} is not supported; expected 'default'")
    return rope.get("rope_theta", float)


def _local_rope(arch: Architecture, windowed: tuple[bool, ...], theta: float) -> LocalRope | None:
    """None if it is the same as the model's."""
    is_same = theta == arch.rope_theta and arch.rope_scaling is None
    return None if is_same or not any(windowed) else LocalRope(theta, windowed)
