"""The architecture that the ``config.json`` of a Hugging Face folder describes."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from gtpo_megatron.errors import ConfigError
from gtpo_megatron.untrusted.fields import Fields
from gtpo_megatron.untrusted.json_text import read_json
from gtpo_megatron.untrusted.text import printable, shown
from gtpo_megatron.weights import variants
from gtpo_megatron.weights.architecture import Architecture
from gtpo_megatron.weights.experts import (
    Experts,
    deepseek_v2_experts,
    deepseek_v3_experts,
    dots1_experts,
    ernie4_5_moe_experts,
    glm4_moe_experts,
    glm4_moe_lite_experts,
    gpt_oss_experts,
    minimax_m2_experts,
    mixtral_experts,
    olmoe_experts,
    qwen2_moe_experts,
    qwen3_5_moe_experts,
    qwen3_moe_experts,
    qwen3_next_experts,
)
from gtpo_megatron.weights.model_shape import DeltaNet, LatentAttention
from gtpo_megatron.weights.quantization import quantization_of
from gtpo_megatron.weights.rope import (
    ROPE_OF_WINDOWS,
    RopeKind,
    original_positions_of,
    read_scaling,
    rope_fields,
    rope_kind,
)
from gtpo_megatron.weights.text_part import has_other_parts, text_config


@dataclass(frozen=True, slots=True)
class _Family:
    """Facts that a Hugging Face class fixes for a model and that its ``config.json`` may leave out.

    Attributes:
        table: key of the name table.
        qkv_bias: biases of the projections, as in ``Architecture``.
        qk_norm: norms of queries and keys, as in ``Architecture``; None: ``use_qk_norm`` of ``config.json`` says it.
        groups: key-value heads if ``config.json`` has no ``num_key_value_heads``; 0, and null there: as many as heads.
        head_size: size of a head if ``config.json`` has no ``head_dim``; 0, and null there: hidden size over heads.
        own_switches: ``attention_bias`` of ``config.json`` goes before ``qkv_bias``; the output projection has no bias.
        window: tokens that attention looks back if ``config.json`` has no ``sliding_window``, which only null switches
            off (None: its absence, too); 0 for a family that looks at that key only where ``use_sliding_window`` is
            true.
        rotary_fraction: rotated part of a head if ``config.json`` has no ``partial_rotary_factor``; None for families
            without that key, which rotate whole heads.
        rope_theta: base of the rotary frequencies if ``config.json`` has none.
        rotates_neighbours: rotation of neighbouring values, as in ``Architecture``.
        unrotated_every: one layer in so many is not rotated if ``config.json`` has no ``no_rope_layers`` and no
            ``no_rope_layer_interval``; 0: every layer is rotated.
        tied: whether embeddings are tied if ``config.json`` has no ``tie_word_embeddings``.
        has_sinks: attention sinks, as in ``Architecture``.
        has_latents: multi-latent attention.
        fuses_qkv: query, key and value in one tensor, as in ``ModelShape``.
        fuses_gate_up: gate and up in one tensor.
        has_delta: gated delta nets in most layers, an output gate in the others, norms from one.
        full_every: each so many'th layer has no window if ``config.json`` has no ``layer_types`` and no
            ``sliding_window_pattern``; 0: a window is that of every layer.
        ffn_key: key of the MLP's width; without a dense MLP the experts'.
        activations: what ``activation_key`` may be, and first what it is where it is absent.
        activation_key: key of the MLP's activation.
        experts: reads them; None for a family of dense models.
        variant: what else the family has, by a function of ``variants.py``.
    """

    table: str
    qkv_bias: bool = False
    qk_norm: bool | None = False
    groups: int = 0
    head_size: int = 0
    own_switches: bool = False
    window: int | None = 0
    rotary_fraction: float | None = None
    rope_theta: float = 10000.0
    rotates_neighbours: bool = False
    unrotated_every: int = 0
    tied: bool = False
    has_sinks: bool = False
    has_latents: bool = False
    fuses_qkv: bool = False
    fuses_gate_up: bool = False
    has_delta: bool = False
    full_every: int = 0
    ffn_key: str = "intermediate_size"
    activations: tuple[str, ...] = ("silu",)
    activation_key: str = "hidden_act"
    experts: Callable[[Path, Fields, int], Experts | None] | None = None
    variant: Callable[[Path, Fields, Architecture, tuple[bool, ...]], Architecture] | None = None


_GLM = _Family(
    "glm",
    groups=2,
    qkv_bias=True,
    head_size=128,
    own_switches=True,
    rotary_fraction=0.5,
    rotates_neighbours=True,
    fuses_gate_up=True,
)

_FAMILIES = {
    "Qwen2ForCausalLM": _Family("qwen2", groups=32, qkv_bias=True),
    "Qwen3ForCausalLM": _Family("qwen3", groups=32, qk_norm=True, head_size=128),
    "LlamaForCausalLM": _Family("llama"),
    "MistralForCausalLM": _Family("llama", groups=8, window=4096),
    "SeedOssForCausalLM": _Family("qwen2", groups=8, qkv_bias=True, head_size=128, own_switches=True),
    "SmolLM3ForCausalLM": _Family("llama", groups=4, rope_theta=2e6, unrotated_every=4, tied=True),
    "Ernie4_5ForCausalLM": _Family(
        "llama", groups=2, head_size=128, rope_theta=5e5, rotates_neighbours=True, tied=True
    ),
    "HunYuanDenseV1ForCausalLM": _Family("hunyuan", qk_norm=True, variant=variants.hunyuan),
    "HeliumForCausalLM": _Family("llama", groups=20, head_size=128, rope_theta=1e5, rotates_neighbours=True),
    "Phi3ForCausalLM": _Family("phi3", window=None, rotary_fraction=1.0, fuses_qkv=True, fuses_gate_up=True),
    "Ministral3ForCausalLM": _Family("llama", groups=8, head_size=128, window=None, variant=variants.ministral3),
    "GraniteForCausalLM": _Family("llama", variant=variants.granite),
    "GlmForCausalLM": _GLM,
    "Glm4ForCausalLM": replace(_GLM, table="glm4", variant=variants.glm4),
    "CwmForCausalLM": _Family(
        "llama", groups=8, head_size=128, window=8192, full_every=4, rope_theta=1e6, variant=variants.cwm
    ),
    "Olmo2ForCausalLM": _Family("olmo2", qk_norm=True, variant=variants.olmo2),
    "Olmo3ForCausalLM": _Family(
        "olmo2", qk_norm=True, window=4096, full_every=4, rope_theta=500000.0, variant=variants.olmo3
    ),
    "Exaone4ForCausalLM": _Family(
        "olmo2", groups=32, qk_norm=True, window=4096, full_every=4, variant=variants.exaone4
    ),
    "GemmaForCausalLM": _Family(
        "llama", groups=16, head_size=256, tied=True, activations=("gelu_pytorch_tanh", "gelu"), variant=variants.gemma
    ),
    "Gemma3ForCausalLM": _Family(
        "gemma3",
        groups=4,
        qk_norm=True,
        head_size=256,
        tied=True,
        window=4096,
        full_every=6,
        rope_theta=1e6,
        activations=("gelu_pytorch_tanh",),
        activation_key="hidden_activation",
        variant=variants.gemma3,
    ),
    "Qwen3MoeForCausalLM": _Family("qwen3_moe", groups=4, qk_norm=True, experts=qwen3_moe_experts),
    "OlmoeForCausalLM": _Family("qwen3_moe", qk_norm=True, experts=olmoe_experts, variant=variants.olmoe),
    "FlexOlmoForCausalLM": _Family(
        "flex_olmo", qk_norm=True, rope_theta=500000.0, experts=olmoe_experts, variant=variants.olmo2
    ),
    "Qwen2MoeForCausalLM": _Family("glm4_moe", groups=16, qkv_bias=True, experts=qwen2_moe_experts),
    "Dots1ForCausalLM": _Family("glm4_moe", groups=32, qk_norm=True, experts=dots1_experts),
    "MixtralForCausalLM": _Family("mixtral", groups=8, window=None, rope_theta=1e6, experts=mixtral_experts),
    "Ernie4_5_MoeForCausalLM": _Family(
        "ernie4_5_moe", groups=4, rope_theta=5e5, rotates_neighbours=True, tied=True, experts=ernie4_5_moe_experts
    ),
    "MiniMaxM2ForCausalLM": _Family(
        "minimax_m2",
        groups=8,
        qk_norm=True,
        head_size=128,
        rotary_fraction=1.0,
        rope_theta=5e6,
        experts=minimax_m2_experts,
        variant=variants.minimax_m2,
    ),
    "Glm4MoeForCausalLM": _Family(
        "glm4_moe", groups=8, own_switches=True, qk_norm=None, rotary_fraction=0.5, experts=glm4_moe_experts
    ),
    "DeepseekV2ForCausalLM": _Family("deepseek", has_latents=True, experts=deepseek_v2_experts),
    "DeepseekV3ForCausalLM": _Family("deepseek", groups=128, has_latents=True, experts=deepseek_v3_experts),
    "Glm4MoeLiteForCausalLM": _Family("deepseek", groups=20, has_latents=True, experts=glm4_moe_lite_experts),
    "Qwen3NextForCausalLM": _Family(
        "qwen3_next",
        groups=2,
        qk_norm=True,
        head_size=256,
        rotary_fraction=0.25,
        has_delta=True,
        experts=qwen3_next_experts,
    ),
    "Qwen3_5ForCausalLM": _Family(
        "qwen3_5", groups=4, qk_norm=True, head_size=256, rotary_fraction=0.25, has_delta=True, variant=variants.qwen3_5
    ),
    "Qwen3_5MoeForCausalLM": _Family(
        "qwen3_5",
        groups=2,
        qk_norm=True,
        head_size=256,
        rotary_fraction=0.25,
        has_delta=True,
        ffn_key="moe_intermediate_size",
        experts=qwen3_5_moe_experts,
        variant=variants.qwen3_5,
    ),
    "GptOssForCausalLM": _Family(
        "gpt_oss",
        groups=8,
        head_size=64,
        qkv_bias=True,
        window=128,
        full_every=2,
        rope_theta=150000.0,
        has_sinks=True,
        experts=gpt_oss_experts,
    ),
}
"""DeepSeek-R1 distillations are of the class they were distilled into."""

_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")

_MISSING = {
    "DeepseekV32ForCausalLM": "sparse attention",
    "GlmMoeDsaForCausalLM": "sparse attention",
    "DeepseekV4ForCausalLM": "compressed attention",
    "KimiLinearForCausalLM": "Kimi delta attention",
    "Gemma2ForCausalLM": "a cap on scores and logits",
    "Cohere2ForCausalLM": "attention and MLP side by side",
    "GraniteMoeHybridForCausalLM": "Granite's factors, and Mamba layers where it has some",
    "NemotronHForCausalLM": "Mamba layers",
    "Lfm2ForCausalLM": "short convolutions",
    "Gemma4ForCausalLM": "heads of several sizes and shared keys",
    "GraniteMoeForCausalLM": "Granite's factors on embedding, residuals and logits",
}
"""What a trainer of these classes would need besides a name table."""

_UNSUPPORTED = (
    ("use_sliding_window", "train with full attention"),
    ("attention_out_bias", "no name table has a bias on the output projection"),
    ("attention_bias", "no name table has a bias on the output projection"),
    ("use_bias", "no name table has a bias on every projection"),
    ("mlp_bias", "no name table has biases in the MLP"),
)
"""Keys of ``config.json`` that must be absent or off, and why or what to do."""


CHUNKS = "dual_chunk_attention_config"
"""Of Qwen's models for a million tokens."""
_MAX_LAYERS = 10_000
"""A name table has an entry for each."""
MAX_SIZE = 1 << 31
"""Of a dimension; no model comes near it."""


def read_architecture(folder: Path) -> Architecture:
    """Reads ``config.json``.

    Raises:
        ConfigError: no such folder or file, an architecture without a name table, or a feature that is not supported.
    """
    arch = architecture_of(model_fields(folder), folder / "config.json")
    return replace(arch, also_sees=has_other_parts(_whole_fields(folder).raw))


def architecture_of(fields: Fields, path: Path) -> Architecture:
    """The architecture that the content of a ``config.json`` describes.

    Args:
        fields: its keys.
        path: where they are from, for messages.

    Raises:
        ConfigError: an architecture without a name table, or a feature that is not supported.
    """
    family = _family(path, fields)
    _refuse_unsupported(path, fields, family)
    return _architecture(path, fields, family)


def model_fields(folder: Path) -> Fields:
    """The keys of a model folder's ``config.json``, of its text part if it has others.

    Raises:
        ConfigError: no such folder or file, or no JSON object in it.
    """
    return Fields(text_config(_whole_fields(folder).raw), printable(folder / "config.json"), ConfigError)


def _whole_fields(folder: Path) -> Fields:
    path = folder / "config.json"
    try:
        return Fields(read_json(path, error=ConfigError), printable(path), ConfigError)
    except ConfigError as error:
        remedy = "--model.path takes a folder, or OWNER/NAME of the hub"
        raise ConfigError(f"model.path={printable(folder)}: no readable config.json ({error}); {remedy}") from error


def _family(path: Path, fields: Fields) -> _Family:
    names = fields.get("architectures", list[str], [])
    if not names:
        likely = fields.get("model_type", str, "").replace("_", "").lower()
        known = [one for one in _FAMILIES if one.removesuffix("ForCausalLM").lower().replace("_", "") == likely]
        such = f', such as "architectures": ["{known[0]}"]' if known else ""
        raise ConfigError(f"{path}: lacks architectures, by which vLLM goes; add the model's class{such}")
    name = names[0]
    if name in _MISSING:
        raise ConfigError(f"{path}: architecture {shown(name)} needs what is not there: {_MISSING[name]}")
    found = [key for key in _EXPERT_KEYS if fields.raw.get(key)]
    with_experts = [known for known, family in _FAMILIES.items() if family.experts is not None]
    if found and name not in with_experts:
        raise ConfigError(
            f"{path}: architecture {shown(name)} is a mixture of experts ({found[0]}={shown(fields.raw[found[0]])}) "
            f"without a name table; known with experts: {', '.join(with_experts)}"
        )
    if name not in _FAMILIES:
        raise ConfigError(f"{path}: architecture {shown(name)} has no name table; known: {', '.join(_FAMILIES)}")
    return _FAMILIES[name]


def _refuse_unsupported(path: Path, fields: Fields, family: _Family) -> None:
    if fields.get("is_causal", bool, True) is False:
        raise ConfigError(f"{path}: is_causal=false is not supported: it attends to tokens that are yet to be sampled")
    for key, remedy in _UNSUPPORTED:
        if fields.raw.get(key) and not ((family.own_switches or family.has_sinks) and key == "attention_bias"):
            is_on = f"{key}=true" if fields.raw[key] is True else key
            raise ConfigError(f"{path}: {is_on} is not supported; {remedy}")
    key, expected = family.activation_key, family.activations
    if (activation := fields.get(key, str, expected[0])) not in expected:
        raise ConfigError(f"{path}: {key}={shown(activation)} is not supported; expected {expected[0]!r}")
    if family.has_sinks:
        _refuse_what_vllm_has_fixed(path, fields)
    known_kinds = [
        "full_attention",
        *["linear_attention"] * family.has_delta,
        *[ROPE_OF_WINDOWS] * bool(family.full_every),
    ]
    if unknown := sorted(set(fields.get("layer_types", list[str], [])).difference(known_kinds)):
        raise ConfigError(
            f"{path}: layer_types has {shown(unknown[0])}, which is not supported; expected "
            f"{' or '.join(map(repr, known_kinds))}"
        )
    _refuse_other_positions(path, fields, family)


def _refuse_other_positions(path: Path, fields: Fields, family: _Family) -> None:
    rope = rope_fields(fields)
    kind = rope_kind(rope)
    known = ("default", "yarn") if family.has_latents else ("default", *get_args(RopeKind))
    if family.fuses_qkv:  # of Phi-3 transformers takes it for longrope
        known = tuple(one for one in known if one != "yarn")
    if family.table == "hunyuan":
        known = ("default", "dynamic")
    if kind not in known:
        *others, last = map(repr, known)
        raise ConfigError(f"{path}: rope type {shown(kind)} is not supported; expected {', '.join(others)} or {last}")
    if family.has_latents and rope.has("attention_factor"):
        raise ConfigError(f"{path}: attention_factor is not supported here: transformers and vLLM read it differently")
    fraction = _rotary_fraction(fields, family)
    if fraction != 1.0 and family.rotary_fraction is None:
        raise ConfigError(f"{path}: partial_rotary_factor={fraction} is not supported; expected 1")


def _refuse_what_vllm_has_fixed(path: Path, fields: Fields) -> None:
    """For gpt-oss, of which vLLM's class looks at few keys."""
    rope, layers = rope_fields(fields), fields.get("num_hidden_layers", int, at_least=1, at_most=_MAX_LAYERS)
    alternating = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)]
    for key, of_type, wanted in (
        ("attention_bias", bool, True),
        ("layer_types", list[str], alternating),
        ("tie_word_embeddings", bool, False),
        ("rms_norm_eps", float, 1e-5),
    ):
        if fields.get(key, of_type, wanted) != wanted:
            raise ConfigError(f"{path}: {key}={shown(fields.raw[key])} is not supported; expected {shown(wanted)}")
    if fields.raw.get("sliding_window", 0) is None:
        raise ConfigError(f"{path}: sliding_window=null is not supported; expected a number of tokens")
    if (kind := rope_kind(rope)) != "yarn":  # without a word of it, transformers' class has other positions again
        raise ConfigError(f"{path}: rope type {shown(kind)} is not supported; expected 'yarn'")
    for key in ("attention_factor", "mscale", "mscale_all_dim"):
        if rope.has(key):
            raise ConfigError(f"{path}: {key} is not supported here: transformers heeds it, vLLM does not")


def _rotary_fraction(fields: Fields, family: _Family) -> float:
    rope = rope_fields(fields)
    where = rope if rope.has("partial_rotary_factor") else fields
    return where.get("partial_rotary_factor", float, family.rotary_fraction or 1.0, at_least=0, at_most=1)


def _unrotated_layers(path: Path, fields: Fields, family: _Family, num_layers: int) -> tuple[int, ...]:
    """Zeros of ``no_rope_layers``, or the last layer of every so many."""
    if not family.unrotated_every:
        return ()
    if fields.raw.get("no_rope_layers") is None:
        every = fields.get("no_rope_layer_interval", int, family.unrotated_every, at_least=1, at_most=_MAX_LAYERS)
        return tuple(range(every - 1, num_layers, every))
    is_rotated = fields.get("no_rope_layers", list[int])
    if len(is_rotated) < num_layers:
        raise ConfigError(f"{path}: no_rope_layers has {len(is_rotated)} entries; expected {num_layers}, one a layer")
    return tuple(layer for layer in range(num_layers) if not is_rotated[layer])


def _windowed_layers(path: Path, fields: Fields, family: _Family, num_layers: int) -> tuple[bool, ...]:
    """Which layers have a window, by ``layer_types``, or else all but each so many'th."""
    if family.window == 0 or fields.raw.get("sliding_window", family.window) is None:
        return (False,) * num_layers
    if not (every := family.full_every):
        return (True,) * num_layers
    if not fields.has("layer_types"):
        every = fields.get("sliding_window_pattern", int, every, at_least=1)
        return tuple(bool((layer + 1) % every) for layer in range(num_layers))
    kinds = fields.get("layer_types", list[str])
    if len(kinds) != num_layers:
        raise ConfigError(f"{path}: layer_types has {len(kinds)} entries; expected {num_layers}, one a layer")
    return tuple(kind == ROPE_OF_WINDOWS for kind in kinds)


def _windows(fields: Fields, family: _Family, windowed: tuple[bool, ...], max_positions: int) -> tuple[int, ...]:
    """``sliding_window`` of the layers that have one; a window as long as the context is none."""
    if not any(windowed):
        return ()
    window = fields.get("sliding_window", int, family.window, at_least=1, at_most=MAX_SIZE)
    return tuple(window * has_window for has_window in windowed) if window < max_positions else ()


def _latents(path: Path, fields: Fields) -> LatentAttention:
    def size(name: str) -> int:
        return fields.get(name, int, at_least=1, at_most=MAX_SIZE)

    if fields.get("rope_interleave", bool, True) is False:
        raise ConfigError(f"{path}: rope_interleave=false is not supported; expected true")
    if "q_lora_rank" not in fields.raw:
        raise ConfigError(f"{path}: lacks q_lora_rank, which is null where queries are made of the hidden state")
    return LatentAttention(
        query_rank=size("q_lora_rank") if fields.has("q_lora_rank") else None,
        key_value_rank=size("kv_lora_rank"),
        rotated_size=size("qk_rope_head_dim"),
        value_size=size("v_head_dim"),
    )


def _delta(path: Path, fields: Fields, num_layers: int) -> DeltaNet:
    """Gated delta nets, in every layer but each fourth if ``config.json`` says nothing else; classes have one size."""
    every = fields.get("full_attention_interval", int, 4, at_least=1, at_most=_MAX_LAYERS)
    usual = ["linear_attention" if (layer + 1) % every else "full_attention" for layer in range(num_layers)]
    kinds = fields.get("layer_types", list[str], usual) if fields.has("layer_types") else usual
    if len(kinds) != num_layers or "full_attention" not in kinds or "linear_attention" not in kinds:
        raise ConfigError(
            f"{path}: layer_types has {len(kinds)} entries of {shown(sorted(set(kinds)))}; expected {num_layers}, and "
            f"both 'linear_attention' and 'full_attention'"
        )
    keys, values = (
        fields.get(f"linear_num_{kind}_heads", int, usually, at_least=1)
        for kind, usually in (("key", 16), ("value", 32))
    )
    if values % keys:
        raise ConfigError(f"{path}: linear_num_key_heads={keys} must divide linear_num_value_heads={values}")
    return DeltaNet(
        num_key_heads=keys,
        num_value_heads=values,
        key_size=fields.get("linear_key_head_dim", int, 128, at_least=1, at_most=MAX_SIZE),
        value_size=fields.get("linear_value_head_dim", int, 128, at_least=1, at_most=MAX_SIZE),
        conv_size=fields.get("linear_conv_kernel_dim", int, 4, at_least=2, at_most=MAX_SIZE),
        layers=tuple(kind == "linear_attention" for kind in kinds),
    )


def _architecture(path: Path, fields: Fields, family: _Family) -> Architecture:
    def size(name: str, default: int | None = None) -> int:
        return fields.get(name, int, default, at_least=1, at_most=MAX_SIZE)

    heads, hidden = size("num_attention_heads"), size("hidden_size")
    usual_groups = heads if "num_key_value_heads" in fields.raw else family.groups or heads
    groups = fields.get("num_key_value_heads", int, usual_groups, at_least=1, at_most=heads)
    usual_size = hidden // heads if "head_dim" in fields.raw else family.head_size or hidden // heads
    head_size = fields.get("head_dim", int, usual_size, at_least=0, at_most=MAX_SIZE) or usual_size
    fraction = _rotary_fraction(fields, family)
    latents = _latents(path, fields) if family.has_latents else None
    if latents is not None:
        if groups != heads:
            raise ConfigError(f"{path}: num_key_value_heads={groups} is not supported; expected {heads}, one a head")
        head_size = size("qk_nope_head_dim") + latents.rotated_size
        fraction = latents.rotated_size / head_size
    if heads % groups or not head_size:
        raise ConfigError(
            f"{path}: num_attention_heads={heads} does not fit num_key_value_heads={groups} and hidden_size={hidden}"
        )
    rotated = int(head_size * fraction) if latents is None else latents.rotated_size
    if rotated % 2 or not rotated:
        raise ConfigError(
            f"{path}: partial_rotary_factor={fraction} of head_dim={head_size} rotates {rotated} elements; expected an "
            f"even number"
        )
    max_positions, rope = size("max_position_embeddings"), rope_fields(fields)
    theta = (rope if rope.has("rope_theta") else fields).get("rope_theta", float, family.rope_theta)
    if not theta > 0:
        raise ConfigError(f"{path}: rope_theta={theta} must be more than 0")
    original = original_positions_of(fields, rope, max_positions)
    scaling = read_scaling(path, rope, original, max_positions, rotated // 2)
    if scaling is not None and scaling.kind == "yarn":
        # vLLM has a table of so many positions, whatever the other field says: the published files leave it unchanged
        max_positions = int(scaling.original_positions * scaling.factor)
    num_layers = fields.get("num_hidden_layers", int, at_least=1, at_most=_MAX_LAYERS)
    windowed = _windowed_layers(path, fields, family, num_layers)
    arch = Architecture(
        family=family.table,
        num_layers=num_layers,
        hidden_size=hidden,
        ffn_size=size(family.ffn_key),
        num_heads=heads,
        num_query_groups=groups,
        head_size=head_size,
        vocab_size=size("vocab_size"),
        max_positions=max_positions,
        norm_eps=fields.get("rms_norm_eps", float, at_least=0),
        rope_theta=theta,
        tied_embeddings=fields.get("tie_word_embeddings", bool, family.tied),
        qkv_bias=fields.get("attention_bias", bool, family.qkv_bias) if family.own_switches else family.qkv_bias,
        has_sinks=family.has_sinks,
        fuses_qkv=family.fuses_qkv,
        fuses_gate_up=family.fuses_gate_up,
        qk_norm=fields.get("use_qk_norm", bool, False) if family.qk_norm is None else family.qk_norm,
        has_output_gate=family.has_delta,
        delta=_delta(path, fields, num_layers) if family.has_delta else None,
        norms_from_one=family.has_delta,
        is_quantized=quantization_of(fields, path) is not None,
        asks_for_chunks=fields.has(CHUNKS),
        rope_scaling=scaling,
        rotary_fraction=fraction,
        rotates_neighbours=family.rotates_neighbours,
        unrotated_layers=_unrotated_layers(path, fields, family, num_layers),
        latents=latents,
        windows=_windows(fields, family, windowed, max_positions),
        experts=None if family.experts is None else family.experts(path, fields, num_layers),
    )
    return arch if family.variant is None else family.variant(path, fields, arch, windowed)
