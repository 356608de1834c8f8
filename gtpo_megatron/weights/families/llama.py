"""Llama 3, 3.1, 3.2, 3.3 and the DeepSeek-R1 distillations into them: no biases; 3.1 on, stretched rotary positions."""

from collections.abc import Iterator

from gtpo_megatron.weights.architecture import Architecture
from gtpo_megatron.weights.families.blocks import attention, gated_mlp, layer_norms
from gtpo_megatron.weights.param_mapping import ParamMapping


def layer_mappings(arch: Architecture, here: str, there: str) -> Iterator[ParamMapping]:
    """The parameters of one layer, by Megatron's prefix of it and Hugging Face's."""
    yield from layer_norms(arch, here, there)
    yield from attention(arch, here, there)
    yield from gated_mlp(arch, here, there)
