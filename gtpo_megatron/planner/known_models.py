"""Shapes of well-known models by their name on the Hugging Face hub, from their public ``config.json``."""

import difflib
from pathlib import Path

from gtpo_megatron.errors import ConfigError
from gtpo_megatron.planner.shape import Experts, ModelShape, read_shape

_QWEN2_5_7B = ModelShape(
    num_layers=28,
    hidden_size=3584,
    ffn_size=18944,
    num_heads=28,
    num_query_groups=4,
    head_size=128,
    vocab_size=152064,
    max_positions=131072,
    qkv_bias=True,
)
_QWEN2_5_32B = ModelShape(
    num_layers=64,
    hidden_size=5120,
    ffn_size=27648,
    num_heads=40,
    num_query_groups=8,
    head_size=128,
    vocab_size=152064,
    max_positions=131072,
    qkv_bias=True,
)
_LLAMA_3_1_8B = ModelShape(
    num_layers=32,
    hidden_size=4096,
    ffn_size=14336,
    num_heads=32,
    num_query_groups=8,
    head_size=128,
    vocab_size=128256,
    max_positions=131072,
)

KNOWN_MODELS: dict[str, ModelShape] = {
    "Qwen/Qwen2.5-7B": _QWEN2_5_7B,
    "Qwen/Qwen2.5-32B": _QWEN2_5_32B,
    "Qwen/Qwen2.5-72B": ModelShape(
        num_layers=80,
        hidden_size=8192,
        ffn_size=29568,
        num_heads=64,
        num_query_groups=8,
        head_size=128,
        vocab_size=152064,
        max_positions=131072,
        qkv_bias=True,
    ),
    "Qwen/Qwen3-32B": ModelShape(
        num_layers=64,
        hidden_size=5120,
        ffn_size=25600,
        num_heads=64,
        num_query_groups=8,
        head_size=128,
        vocab_size=151936,
        max_positions=40960,
        qk_norm=True,
    ),
    "Qwen/Qwen3-30B-A3B": ModelShape(
        num_layers=48,
        hidden_size=2048,
        ffn_size=6144,
        num_heads=32,
        num_query_groups=4,
        head_size=128,
        vocab_size=151936,
        max_positions=40960,
        qk_norm=True,
        experts=Experts(num_experts=128, experts_per_token=8, ffn_size=768),
    ),
    "meta-llama/Llama-3.1-8B": _LLAMA_3_1_8B,
    "meta-llama/Llama-3.1-70B": ModelShape(
        num_layers=80,
        hidden_size=8192,
        ffn_size=28672,
        num_heads=64,
        num_query_groups=8,
        head_size=128,
        vocab_size=128256,
        max_positions=131072,
    ),
    # distilled from R1 into Qwen2.5-Math-7B and Llama-3.1-8B: their shapes, another rotary base
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": _QWEN2_5_7B,
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": _LLAMA_3_1_8B,
}
"""Hub name of the base model -> shape."""

_SUFFIXES = ("-Instruct", "-Base")
"""Tuned variants have the shape of their base."""


def find_shape(path: str) -> ModelShape:
    """The shape of ``model.path``: a folder with a ``config.json``, or the name of a known model.

    A folder named like a known model needs no ``config.json``, so that a plan can be made before the download.

    Raises:
        ConfigError: neither; the message names the known models.
    """
    if (Path(path) / "config.json").is_file():
        return read_shape(Path(path))
    short_names = {name.split("/")[1]: shape for name, shape in KNOWN_MODELS.items()}
    asked = Path(path).name
    for suffix in _SUFFIXES:
        asked = asked.removesuffix(suffix)
    if asked in short_names:
        return short_names[asked]
    close = difflib.get_close_matches(asked, short_names, n=1)
    hint = f"perhaps you meant {close[0]!r}; " if close else ""
    raise ConfigError(
        f"model.path={path!r}: neither a folder with a config.json nor a model whose shape is known; {hint}"
        f"known: {', '.join(KNOWN_MODELS)}"
    )
