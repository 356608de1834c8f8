"""Qwen3, dense: RMSNorm on every head's query and key, no biases, a head size of its own."""

from collections.abc import Iterator

from gtpo_megatron.weights.architecture import Architecture
from gtpo_megatron.weights.families.blocks import attention, gated_mlp, layer_norms, qk_norms
from gtpo_megatron.weights.param_mapping import ParamMapping


def layer_mappings(arch: Architecture, here: str, there: str) -> Iterator[ParamMapping]:
    """The parameters of one layer, by Megatron's prefix of it and Hugging Face's."""
    yield from layer_norms(arch, here, there)
    yield from attention(arch, here, there)
    yield from qk_norms(arch, here, there)
    yield from gated_mlp(arch, here, there)
