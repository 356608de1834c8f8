"""Engines in FP8: which models vLLM has so, and which of its linear layers stay as they are."""

from gtpo_megatron.errors import ConfigError
from gtpo_megatron.weights.model_shape import ModelShape

WHOLE_LAYERS = ("*.mlp.gate",)
"""Patterns of names in vLLM of routers, which choose other experts if they are rounded: Qwen3-MoE's are linear layers
as others are (vLLM 0.32)."""

LEAST_CAPABILITY = (8, 9)
"""Of a GPU with products in FP8: Ada, Hopper and later."""


def check_fp8(shape: ModelShape, *, where: str = "rollout") -> None:
    """Checks that an engine can have the model's layers in FP8.

    Args:
        shape: of the model.
        where: prefix of the engine's options in messages.

    Raises:
        ConfigError: it has layers that vLLM 0.32 takes for FP8 in part only, without a word.
    """
    reasons = {
        # its products of small batches read the weight without its scale, if it has DeepSeek V3's sizes
        "latents": shape.latents is not None,
        # its experts' biases are dropped by the kernel that FP8 takes first
        "experts with biases": shape.has_sinks,
        # strengths and decays of a state would be rounded as well
        "gated delta nets": shape.delta is not None,
    }
    for what, is_there in reasons.items():
        if is_there:
            raise ConfigError(
                f"{where}.dtype='fp8': vLLM has no models with {what} in FP8 that say what the trainer says; use "
                f"{where}.dtype='bfloat16'"
            )
