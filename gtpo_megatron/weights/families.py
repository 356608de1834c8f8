"""The name table of every model family: of which rows a decoder layer is made, and the rows.

Megatron names are those of its local layers; ``reshard.fused_name`` says how Transformer Engine spells some of them.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from gtpo_megatron.weights.architecture import Architecture
from gtpo_megatron.weights.model_shape import DeltaNet
from gtpo_megatron.weights.param_mapping import (
    QKV,
    ColumnParallel,
    GatedMLP,
    HeadParts,
    ParamMapping,
    Replicated,
    RowParallel,
)


@dataclass(frozen=True, slots=True)
class Layer:
    """A decoder layer on a rank.

    Attributes:
        number: number of the layer in the model.
        here: Megatron's prefix of its parameters (``decoder.layers.3``).
        there: Hugging Face's prefix of its tensors (``model.layers.11``).
        experts: numbers of the experts that the rank holds; Megatron counts those of a rank from 0.
    """

    number: int
    here: str
    there: str
    experts: range


_BEFORE_ATTENTION, _BEHIND_ATTENTION = "input_layernorm", "self_attn_bda.norm"
_BEFORE_MLP, _BEHIND_MLP = "pre_mlp_layernorm", "mlp_bda.norm"

PRE_NORMS = {_BEFORE_ATTENTION: "input", _BEFORE_MLP: "post_attention"}
POST_NORMS = {_BEHIND_ATTENTION: "post_attention", _BEHIND_MLP: "post_feedforward"}
GEMMA_NORMS = {_BEFORE_ATTENTION: "input", _BEFORE_MLP: "pre_feedforward", **POST_NORMS}
GLM4_NORMS = {**PRE_NORMS, _BEHIND_ATTENTION: "post_self_attn", _BEHIND_MLP: "post_mlp"}
"""Megatron's name of a layer's norm -> Hugging Face's, less ``_layernorm``, of which one name stands for two places."""


def layer_norms(arch: Architecture, layer: Layer, names: Mapping[str, str] = PRE_NORMS) -> Iterator[ParamMapping]:
    """RMSNorms of hidden states, before or behind attention and MLP."""
    for ours, theirs in names.items():
        yield Replicated(f"{layer.here}.{ours}.weight", f"{layer.there}.{theirs}_layernorm.weight", arch.hidden_size)


def attention(
    arch: Architecture, layer: Layer, names: tuple[str, str, str] = ("q", "k", "v")
) -> Iterator[ParamMapping]:
    """Query, key, value and output projections, without biases; those of one name are in one tensor."""
    yield _qkv(arch, layer, "weight", arch.hidden_size, names)
    yield RowParallel(
        f"{layer.here}.self_attention.linear_proj.weight",
        f"{layer.there}.self_attn.o_proj.weight",
        arch.hidden_size,
        arch.num_heads * arch.head_size,
    )


def attention_or_delta_net(arch: Architecture, layer: Layer) -> Iterator[ParamMapping]:
    """Projections, convolution, decay, norm and output of a gated delta net; in other layers attention with its norms.

    Tensor-parallel ranks share the key heads, each with its value heads: a projection has, for one key head after
    another, all that belongs to it.
    """
    delta = arch.delta
    assert delta is not None  # the family says so
    if not delta.layers[layer.number]:
        yield from attention(arch, layer)
        yield from qk_norms(arch, layer)
        return
    here, there, hidden_size = f"{layer.here}.self_attention", f"{layer.there}.linear_attn", arch.hidden_size
    if delta.has_parts_apart:
        yield from _projections_apart(delta, here, there, hidden_size)
    else:
        width, rates = 2 * (delta.key_width + delta.value_width), 2 * delta.num_value_heads
        yield ColumnParallel(f"{here}.in_proj.weight", f"{there}.in_proj_qkvz.weight", width, hidden_size)
        yield Replicated(f"{here}.gates_proj.weight", f"{there}.in_proj_ba.weight", rates, hidden_size)
    first = 0
    for name, channels in (("query", delta.key_width), ("key", delta.key_width), ("value", delta.value_width)):
        yield ColumnParallel(f"{here}.conv_{name}", f"{there}.conv1d.weight", channels, delta.conv_size, first)
        first += channels
    for name in ("A_log", "dt_bias"):
        yield ColumnParallel(f"{here}.{name}", f"{there}.{name}", delta.num_value_heads, 1)
    yield Replicated(f"{here}.norm.weight", f"{there}.norm.weight", delta.value_size)
    yield RowParallel(f"{here}.out_proj.weight", f"{there}.out_proj.weight", hidden_size, delta.value_width)


def _projections_apart(delta: DeltaNet, here: str, there: str, hidden_size: int) -> Iterator[HeadParts]:
    """Of a delta net, key head after key head: query, key, values and their gates; strengths and decays of values."""
    name, heads = f"{there}.in_proj_qkv.weight", delta.num_key_heads
    per_head = delta.num_value_heads // heads
    values = per_head * delta.value_size
    parts = (
        (name, 0, delta.key_size),
        (name, delta.key_width, delta.key_size),
        (name, 2 * delta.key_width, values),
        (f"{there}.in_proj_z.weight", 0, values),
    )
    yield HeadParts(f"{here}.in_proj.weight", parts, heads, hidden_size)
    rates = tuple((f"{there}.in_proj_{rate}.weight", 0, per_head) for rate in ("b", "a"))
    yield HeadParts(f"{here}.gates_proj.weight", rates, heads, hidden_size, is_split=False)


def latent_attention(arch: Architecture, layer: Layer) -> Iterator[ParamMapping]:
    """Multi-latent attention: projections to latents, their norms, projections to heads, output projection."""
    here, there = f"{layer.here}.self_attention", f"{layer.there}.self_attn"
    latents, hidden_size = arch.latents, arch.hidden_size
    assert latents is not None  # the family says so
    if latents.query_rank is None:
        yield ColumnParallel(f"{here}.linear_q_proj.weight", f"{there}.q_proj.weight", arch.query_width, hidden_size)
    else:
        rank = latents.query_rank
        yield Replicated(f"{here}.linear_q_down_proj.weight", f"{there}.q_a_proj.weight", rank, hidden_size)
        yield Replicated(f"{here}.q_layernorm.weight", f"{there}.q_a_layernorm.weight", rank)
        yield ColumnParallel(f"{here}.linear_q_up_proj.weight", f"{there}.q_b_proj.weight", arch.query_width, rank)
    rank, keys_and_values = latents.key_value_rank, arch.head_size - latents.rotated_size + latents.value_size
    yield Replicated(
        f"{here}.linear_kv_down_proj.weight", f"{there}.kv_a_proj_with_mqa.weight", latents.cached_size, hidden_size
    )
    yield Replicated(f"{here}.kv_layernorm.weight", f"{there}.kv_a_layernorm.weight", rank)
    yield ColumnParallel(
        f"{here}.linear_kv_up_proj.weight", f"{there}.kv_b_proj.weight", arch.num_heads * keys_and_values, rank
    )
    yield RowParallel(f"{here}.linear_proj.weight", f"{there}.o_proj.weight", hidden_size, arch.output_width)


def output_bias(arch: Architecture, layer: Layer) -> Iterator[ParamMapping]:
    """Bias of the output projection, which one tensor rank's share of the sum has."""
    name = "self_attn.o_proj.bias"
    yield Replicated(f"{layer.here}.self_attention.linear_proj.bias", f"{layer.there}.{name}", arch.hidden_size)


def sinks(arch: Architecture, layer: Layer) -> Iterator[ParamMapping]:
    """One number a head, that its softmax's sum has besides."""
    ours = f"{layer.here}.self_attention.core_attention.softmax_offset"
    yield ColumnParallel(ours, f"{layer.there}.self_attn.sinks", arch.num_heads, 1)


def qkv_bias(arch: Architecture, layer: Layer) -> Iterator[ParamMapping]:
    """Biases of the query, key and value projections, if the model has them."""
    if arch.qkv_bias:
        yield _qkv(arch, layer, "bias", 1, ("q", "k", "v"))


def qk_norms(arch: Architecture, layer: Layer) -> Iterator[ParamMapping]:
    """RMSNorms of queries and keys, if the model has them: over each head, one weight for all, or over all heads."""
    for name, size in zip(("q", "k"), arch.qk_norm_sizes, strict=False):
        ours = f"{layer.here}.self_attention.{name}_layernorm.weight"
        yield Replicated(ours, f"{layer.there}.self_attn.{name}_norm.weight", size)


def rotated_head_norms(arch: Architecture, layer: Layer) -> Iterator[ParamMapping]:
    """RMSNorms of each head's rotated query and key, one weight for all heads."""
    for ours, theirs in (("q", "query"), ("k", "key")):
        here = f"{layer.here}.self_attention.core_attention.{ours}_layernorm.weight"
        yield Replicated(here, f"{layer.there}.self_attn.{theirs}_layernorm.weight", arch.head_size)


def gated_mlp(arch: Architecture, layer: Layer, names: tuple[str, str] = ("gate", "up")) -> Iterator[ParamMapping]:
    """Gate, up and down projections, without biases; those of one name are in one tensor."""
    yield from _mlp(f"{layer.here}.mlp", f"{layer.there}.mlp", arch.hidden_size, arch.ffn_size, names=names)


def joint_mlp(arch: Architecture, layer: Layer) -> Iterator[ParamMapping]:
    """The same in one tensor, of a family that vLLM runs by transformers' own class, whose workers share it as one."""
    for mapping in gated_mlp(arch, layer, ("gate_up",) * 2):
        yield replace(mapping, workers_share_halves=False) if isinstance(mapping, GatedMLP) else mapping


def gated_mlp_or_experts(
    arch: Architecture, layer: Layer, bias: str = "gate.e_score_correction_bias"
) -> Iterator[ParamMapping]:
    """The dense MLP of a layer without experts; else router, the rank's experts and the shared experts."""
    experts = arch.experts
    if experts is None or not experts.layers[layer.number]:
        yield from gated_mlp(arch, layer)
        return
    here, there = f"{layer.here}.mlp", f"{layer.there}.mlp"
    yield Replicated(f"{here}.router.weight", f"{there}.gate.weight", experts.num_experts, arch.hidden_size)
    if experts.has_bias:
        yield Replicated(f"{here}.router.expert_bias", f"{there}.{bias}", experts.num_experts)
    for local, expert in enumerate(layer.experts):
        mine, its = f"{here}.experts.local_experts.{local}", f"{there}.experts.{expert}"
        yield from _mlp(mine, its, arch.hidden_size, experts.ffn_size, expert)
    if experts.shared_ffn_size:
        name = "shared_expert" if experts.has_shared_gate else "shared_experts"
        yield from _mlp(f"{here}.shared_experts", f"{there}.{name}", arch.hidden_size, experts.shared_ffn_size)
    if experts.has_shared_gate:
        yield Replicated(
            f"{here}.shared_experts.gate_weight", f"{there}.shared_expert_gate.weight", 1, arch.hidden_size
        )


def numbered_experts(arch: Architecture, layer: Layer) -> Iterator[ParamMapping]:
    """Router and the rank's experts, whose gate, down and up projections are called w1, w2 and w3."""
    experts, here, there = arch.experts, f"{layer.here}.mlp", f"{layer.there}.block_sparse_moe"
    assert experts is not None  # the family says so
    yield Replicated(f"{here}.router.weight", f"{there}.gate.weight", experts.num_experts, arch.hidden_size)
    if experts.has_bias:
        yield Replicated(f"{here}.router.expert_bias", f"{there}.e_score_correction_bias", experts.num_experts)
    for local, expert in enumerate(layer.experts):
        mine, its = f"{here}.experts.local_experts.{local}", f"{there}.experts.{expert}"
        sizes = experts.ffn_size, arch.hidden_size, expert
        yield GatedMLP(f"{mine}.linear_fc1.weight", f"{its}.w1.weight", f"{its}.w3.weight", *sizes)
        yield RowParallel(f"{mine}.linear_fc2.weight", f"{its}.w2.weight", arch.hidden_size, experts.ffn_size, expert)


def biased_experts(arch: Architecture, layer: Layer) -> Iterator[ParamMapping]:
    """Router and the rank's experts, all with biases; a folder has experts as ``hf/stacked_experts.py`` says."""
    experts, here, there = arch.experts, f"{layer.here}.mlp", f"{layer.there}.mlp"
    assert experts is not None  # the family says so
    yield Replicated(f"{here}.router.weight", f"{there}.router.weight", experts.num_experts, arch.hidden_size)
    yield Replicated(f"{here}.router.bias", f"{there}.router.bias", experts.num_experts)
    for local, expert in enumerate(layer.experts):
        mine, its = f"{here}.experts.local_experts.{local}", f"{there}.experts.{expert}"
        yield from _mlp(mine, its, arch.hidden_size, experts.ffn_size, expert)
        gate, up = (f"{its}.{name}_proj.bias" for name in ("gate", "up"))
        yield GatedMLP(f"{mine}.linear_fc1.bias", gate, up, experts.ffn_size, 1, expert)
        yield Replicated(f"{mine}.linear_fc2.bias", f"{its}.down_proj.bias", arch.hidden_size, expert=expert)


def _mlp(
    here: str,
    there: str,
    hidden_size: int,
    ffn_size: int,
    expert: int | None = None,
    names: tuple[str, str] = ("gate", "up"),
) -> Iterator[ParamMapping]:
    gate, up = (f"{there}.{name}_proj.weight" for name in names)
    yield GatedMLP(f"{here}.linear_fc1.weight", gate, up, ffn_size, hidden_size, expert)
    yield RowParallel(f"{here}.linear_fc2.weight", f"{there}.down_proj.weight", hidden_size, ffn_size, expert)


def _qkv(arch: Architecture, layer: Layer, part: str, columns: int, names: tuple[str, str, str]) -> QKV:
    query, key, value = (f"{layer.there}.self_attn.{name}_proj.{part}" for name in names)
    return QKV(
        f"{layer.here}.self_attention.linear_qkv.{part}",
        query,
        key,
        value,
        arch.num_heads,
        arch.num_query_groups,
        arch.head_size,
        columns,
        arch.has_output_gate,
    )


LayerRows = Callable[[Architecture, Layer], Iterator[ParamMapping]]

LAYER_TABLES: dict[str, tuple[LayerRows, ...]] = {
    # Qwen2, Qwen2.5 and the DeepSeek-R1 distillations into them; Seed-OSS
    "qwen2": (layer_norms, attention, qkv_bias, gated_mlp),
    # Qwen3, dense
    "qwen3": (layer_norms, attention, qk_norms, gated_mlp),
    # Llama 3, 3.1, 3.2, 3.3 and the DeepSeek-R1 distillations into them; 3.1 on have stretched rotary positions
    # Mistral, Ministral 3; SmolLM3, of which some layers are not rotated; ERNIE 4.5; Granite 3; Gemma; CWM
    "llama": (layer_norms, attention, gated_mlp),
    # Hunyuan, dense: norms of rotated heads
    "hunyuan": (layer_norms, attention, rotated_head_norms, gated_mlp),
    # OLMo 2 and 3, EXAONE 4: norms behind attention and MLP
    "olmo2": (partial(layer_norms, names=POST_NORMS), attention, qk_norms, gated_mlp),
    # Gemma 3: norms before and behind
    "gemma3": (partial(layer_norms, names=GEMMA_NORMS), attention, qk_norms, gated_mlp),
    # GLM-4-0414: norms before and behind, gate and up in one tensor
    "glm4": (
        partial(layer_norms, names=GLM4_NORMS),
        attention,
        qkv_bias,
        partial(gated_mlp, names=("gate_up",) * 2),
    ),
    # GLM-4-9B: gate and up in one tensor
    "glm": (layer_norms, attention, qkv_bias, joint_mlp),
    # Phi-4: Llama's layer in fewer tensors
    "phi3": (layer_norms, partial(attention, names=("qkv",) * 3), partial(gated_mlp, names=("gate_up",) * 2)),
    # Qwen3-MoE: 30B-A3B, 235B-A22B; OLMoE
    "qwen3_moe": (layer_norms, attention, qk_norms, gated_mlp_or_experts),
    # FlexOlmo: OLMo 2's layer with experts
    "flex_olmo": (partial(layer_norms, names=POST_NORMS), attention, qk_norms, gated_mlp_or_experts),
    # GLM-4.5, 4.5-Air, 4.6: their first layers are dense; Qwen1.5 and 2 with experts; dots.llm1
    "glm4_moe": (layer_norms, attention, qkv_bias, qk_norms, gated_mlp_or_experts),
    # ERNIE 4.5 21B-A3B, 300B-A47B
    "ernie4_5_moe": (
        layer_norms,
        attention,
        partial(gated_mlp_or_experts, bias="moe_statics.e_score_correction_bias"),
    ),
    # Mixtral 8x7B, 8x22B
    "mixtral": (layer_norms, attention, numbered_experts),
    # MiniMax M2: Mixtral's experts with an expert bias
    "minimax_m2": (layer_norms, attention, qk_norms, numbered_experts),
    # DeepSeek V2-Lite, V3, R1; Moonlight, Kimi K2; GLM-4.7-Flash: multi-latent attention, first layers dense
    "deepseek": (layer_norms, latent_attention, gated_mlp_or_experts),
    # Qwen3-Next: gated delta nets in three of four layers
    "qwen3_next": (layer_norms, attention_or_delta_net, gated_mlp_or_experts),
    # Qwen3.5: the same, its delta nets' projections in four tensors
    "qwen3_5": (layer_norms, attention_or_delta_net, gated_mlp_or_experts),
    # gpt-oss: sinks, a bias wherever there is a projection
    "gpt_oss": (layer_norms, attention, qkv_bias, output_bias, sinks, biased_experts),
}
"""Family -> rows of one layer. ``config_json.py`` says which models have them; only other rows need an entry here."""
