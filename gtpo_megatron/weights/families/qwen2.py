"""Qwen2, Qwen2.5 and the DeepSeek-R1 distillations into them: biases on query, key and value."""

from collections.abc import Iterator

from gtpo_megatron.weights.architecture import Architecture
from gtpo_megatron.weights.families.blocks import attention, gated_mlp, layer_norms, qkv_bias
from gtpo_megatron.weights.param_mapping import ParamMapping


def layer_mappings(arch: Architecture, here: str, there: str) -> Iterator[ParamMapping]:
    """The parameters of one layer, by Megatron's prefix of it and Hugging Face's."""
    yield from layer_norms(arch, here, there)
    yield from attention(arch, here, there)
    yield from qkv_bias(arch, here, there)
    yield from gated_mlp(arch, here, there)
