"""The name table of every model family: of which rows a pre-norm decoder layer is made, and the rows.

``here`` is Megatron's prefix of the layer (``decoder.layers.3``), ``there`` Hugging Face's (``model.layers.11``).
Megatron names are those of its local layers; ``reshard.fused_name`` says how Transformer Engine spells two of them.
"""

from collections.abc import Callable, Iterator

from gtpo_megatron.weights.architecture import Architecture
from gtpo_megatron.weights.param_mapping import QKV, GatedMLP, ParamMapping, Replicated, RowParallel


def layer_norms(arch: Architecture, here: str, there: str) -> Iterator[ParamMapping]:
    """RMSNorm before attention and before the MLP."""
    yield Replicated(f"{here}.input_layernorm.weight", f"{there}.input_layernorm.weight", arch.hidden_size)
    yield Replicated(f"{here}.pre_mlp_layernorm.weight", f"{there}.post_attention_layernorm.weight", arch.hidden_size)


def attention(arch: Architecture, here: str, there: str) -> Iterator[ParamMapping]:
    """Query, key, value and output projections, without biases."""
    yield _qkv(arch, here, there, "weight", arch.hidden_size)
    yield RowParallel(
        f"{here}.self_attention.linear_proj.weight",
        f"{there}.self_attn.o_proj.weight",
        arch.hidden_size,
        arch.num_heads * arch.head_size,
    )


def qkv_bias(arch: Architecture, here: str, there: str) -> Iterator[ParamMapping]:
    """Biases of the query, key and value projections."""
    yield _qkv(arch, here, there, "bias", 1)


def qk_norms(arch: Architecture, here: str, there: str) -> Iterator[ParamMapping]:
    """RMSNorm over each head's query and key, one weight for all heads."""
    for name in ("q", "k"):
        yield Replicated(
            f"{here}.self_attention.{name}_layernorm.weight", f"{there}.self_attn.{name}_norm.weight", arch.head_size
        )


def gated_mlp(arch: Architecture, here: str, there: str) -> Iterator[ParamMapping]:
    """Gate, up and down projections, without biases."""
    yield GatedMLP(
        f"{here}.mlp.linear_fc1.weight",
        f"{there}.mlp.gate_proj.weight",
        f"{there}.mlp.up_proj.weight",
        arch.ffn_size,
        arch.hidden_size,
    )
    yield RowParallel(f"{here}.mlp.linear_fc2.weight", f"{there}.mlp.down_proj.weight", arch.hidden_size, arch.ffn_size)


def _qkv(arch: Architecture, here: str, there: str, part: str, columns: int) -> QKV:
    return QKV(
        f"{here}.self_attention.linear_qkv.{part}",
        f"{there}.self_attn.q_proj.{part}",
        f"{there}.self_attn.k_proj.{part}",
        f"{there}.self_attn.v_proj.{part}",
        arch.num_heads,
        arch.num_query_groups,
        arch.head_size,
        columns,
    )


LayerRows = Callable[[Architecture, str, str], Iterator[ParamMapping]]

LAYER_TABLES: dict[str, tuple[LayerRows, ...]] = {
    # Qwen2, Qwen2.5 and the DeepSeek-R1 distillations into them
    "qwen2": (layer_norms, attention, qkv_bias, gated_mlp),
    # Qwen3, dense
    "qwen3": (layer_norms, attention, qk_norms, gated_mlp),
    # Llama 3, 3.1, 3.2, 3.3 and the DeepSeek-R1 distillations into them; 3.1 on have stretched rotary positions
    "llama": (layer_norms, attention, gated_mlp),
}
"""Family -> rows of one layer; to add a family, add it here and in ``architecture.py``."""
