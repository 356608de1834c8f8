"""Qwen2 and Qwen2.5: grouped-query attention with biases on query, key and value, gated MLP, RMSNorm."""

from collections.abc import Iterator

from gtpo_megatron.weights.architecture import Architecture
from gtpo_megatron.weights.param_mapping import QKV, GatedMLP, ParamMapping, Replicated, RowParallel


def layer_mappings(arch: Architecture, layer: int, local_layer: int) -> Iterator[ParamMapping]:
    """The parameters of one layer.

    Args:
        arch: shape of the model.
        layer: index in the whole model, Hugging Face's.
        local_layer: index within this pipeline stage, Megatron's.
    """
    here, there = f"decoder.layers.{local_layer}", f"model.layers.{layer}"
    attention = arch.num_heads * arch.head_size
    yield Replicated(f"{here}.input_layernorm.weight", f"{there}.input_layernorm.weight", arch.hidden_size)
    for part, columns in (("weight", arch.hidden_size), ("bias", 1)):
        yield QKV(
            f"{here}.self_attention.linear_qkv.{part}",
            f"{there}.self_attn.q_proj.{part}",
            f"{there}.self_attn.k_proj.{part}",
            f"{there}.self_attn.v_proj.{part}",
            arch.num_heads,
            arch.num_query_groups,
            arch.head_size,
            columns,
        )
    yield RowParallel(
        f"{here}.self_attention.linear_proj.weight", f"{there}.self_attn.o_proj.weight", arch.hidden_size, attention
    )
    yield Replicated(f"{here}.pre_mlp_layernorm.weight", f"{there}.post_attention_layernorm.weight", arch.hidden_size)
    yield GatedMLP(
        f"{here}.mlp.linear_fc1.weight",
        f"{there}.mlp.gate_proj.weight",
        f"{there}.mlp.up_proj.weight",
        arch.ffn_size,
        arch.hidden_size,
    )
    yield RowParallel(f"{here}.mlp.linear_fc2.weight", f"{there}.mlp.down_proj.weight", arch.hidden_size, arch.ffn_size)
