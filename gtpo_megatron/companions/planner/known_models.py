"""Shapes of well-known models by their name on the Hugging Face hub, from their public ``config.json``."""

import difflib
from pathlib import Path
from typing import Any

from gtpo_megatron.config.model import is_gguf, is_hub_name
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.weights.config_json import read_architecture
from gtpo_megatron.weights.experts import GPT_OSS_CLAMP, Experts
from gtpo_megatron.weights.gguf.source import named_architecture
from gtpo_megatron.weights.hf.hub import hub_config
from gtpo_megatron.weights.model_shape import DeltaNet, LatentAttention, ModelShape


def _shape(layers: int, hidden: int, ffn: int, heads: int, groups: int, vocab: int, **more: Any) -> ModelShape:
    """Heads have 128 columns if nothing else is said."""
    return ModelShape(
        num_layers=layers,
        hidden_size=hidden,
        ffn_size=ffn,
        num_heads=heads,
        num_query_groups=groups,
        vocab_size=vocab,
        **{"head_size": 128, "max_positions": 131072, **more},
    )


_QWEN2_5_7B = _shape(28, 3584, 18944, 28, 4, 152064, qkv_bias=True)
_LLAMA_3_1_8B = _shape(32, 4096, 14336, 32, 8, 128256)


def _qwen3_next(layers: int) -> ModelShape:
    """Delta nets in three of four layers; attention behind them, whose outputs are gated as the shared expert's is."""
    delta = DeltaNet(
        num_key_heads=16,
        num_value_heads=32,
        key_size=128,
        value_size=128,
        conv_size=4,
        layers=(True, True, True, False) * (layers // 4),
    )
    experts = Experts(
        num_experts=512,
        experts_per_token=10,
        ffn_size=512,
        layers=(True,) * layers,
        shared_ffn_size=512,
        has_shared_gate=True,
    )
    more = {"head_size": 256, "qk_norm": True, "has_output_gate": True, "max_positions": 262144}
    return _shape(layers, 2048, 5120, 16, 2, 151936, delta=delta, experts=experts, **more)


def _qwen3_experts(ffn: int, layers: int) -> Experts:
    """Experts in every layer."""
    return Experts(num_experts=128, experts_per_token=8, ffn_size=ffn, layers=(True,) * layers)


def _glm4_5_experts(num: int, ffn: int, dense: int, layers: int, scaling: float) -> Experts:
    """Dense layers first; one shared expert, which is as wide as a routed one."""
    return Experts(
        num_experts=num,
        experts_per_token=8,
        ffn_size=ffn,
        layers=(False,) * dense + (True,) * (layers - dense),
        shared_ffn_size=ffn,
        score="sigmoid",
        scaling=scaling,
        has_bias=True,
    )


def _gpt_oss(layers: int, num_experts: int) -> ModelShape:
    """A window in every other layer; both sizes are as wide, and send a token to four experts."""
    experts = Experts(
        num_experts=num_experts, experts_per_token=4, ffn_size=2880, layers=(True,) * layers, clamp=GPT_OSS_CLAMP
    )
    more = {"head_size": 64, "qkv_bias": True, "has_sinks": True, "windows": (128, 0) * (layers // 2)}
    return _shape(layers, 2880, 2880, 64, 8, 201088, experts=experts, **more)


def _deepseek(
    sizes: tuple[int, int, int, int, int], experts: Experts, *, query_rank: int | None = None, **more: Any
) -> ModelShape:
    """Multi-latent attention; sizes as of ``_shape`` but without groups. All of them have the same latent."""
    layers, hidden, ffn, heads, vocab = sizes
    latents = LatentAttention(query_rank=query_rank, key_value_rank=512, rotated_size=64, value_size=128)
    return _shape(
        layers, hidden, ffn, heads, heads, vocab, experts=experts, **{"latents": latents, "head_size": 192, **more}
    )


def _deepseek_experts(num: int, chosen: int, ffn: int, dense: int, layers: int, **more: Any) -> Experts:
    """Dense layers first; as wide as one routed expert is a shared one."""
    return Experts(
        num_experts=num,
        experts_per_token=chosen,
        ffn_size=ffn,
        layers=(False,) * dense + (True,) * (layers - dense),
        **{"shared_ffn_size": ffn, "score": "sigmoid", "has_bias": True, **more},
    )


_DEEPSEEK_V3 = _deepseek(
    (61, 7168, 18432, 128, 129280),
    _deepseek_experts(256, 8, 2048, 3, 61, scaling=2.5, num_groups=8, groups_per_token=4),
    query_rank=1536,
    max_positions=163840,
)

KNOWN_MODELS: dict[str, ModelShape] = {
    "Qwen/Qwen2.5-0.5B": _shape(
        24, 896, 4864, 14, 2, 151936, head_size=64, qkv_bias=True, tied_embeddings=True, max_positions=32768
    ),
    "Qwen/Qwen2.5-1.5B": _shape(
        28, 1536, 8960, 12, 2, 151936, qkv_bias=True, tied_embeddings=True, max_positions=32768
    ),
    "Qwen/Qwen2.5-3B": _shape(36, 2048, 11008, 16, 2, 151936, qkv_bias=True, tied_embeddings=True, max_positions=32768),
    "Qwen/Qwen2.5-7B": _QWEN2_5_7B,
    "Qwen/Qwen2.5-32B": _shape(64, 5120, 27648, 40, 8, 152064, qkv_bias=True),
    "Qwen/Qwen2.5-72B": _shape(80, 8192, 29568, 64, 8, 152064, qkv_bias=True),
    "Qwen/Qwen3-0.6B": _shape(28, 1024, 3072, 16, 8, 151936, qk_norm=True, tied_embeddings=True, max_positions=40960),
    "Qwen/Qwen3-1.7B": _shape(28, 2048, 6144, 16, 8, 151936, qk_norm=True, tied_embeddings=True, max_positions=40960),
    "Qwen/Qwen3-4B": _shape(36, 2560, 9728, 32, 8, 151936, qk_norm=True, tied_embeddings=True, max_positions=40960),
    "Qwen/Qwen3-8B": _shape(36, 4096, 12288, 32, 8, 151936, qk_norm=True, max_positions=40960),
    "Qwen/Qwen3-14B": _shape(40, 5120, 17408, 40, 8, 151936, qk_norm=True, max_positions=40960),
    "Qwen/Qwen3-32B": _shape(64, 5120, 25600, 64, 8, 151936, qk_norm=True, max_positions=40960),
    "Qwen/Qwen3-30B-A3B": _shape(
        48, 2048, 6144, 32, 4, 151936, qk_norm=True, max_positions=40960, experts=_qwen3_experts(768, 48)
    ),
    "Qwen/Qwen3-235B-A22B": _shape(
        94, 4096, 12288, 64, 4, 151936, qk_norm=True, max_positions=40960, experts=_qwen3_experts(1536, 94)
    ),
    # without the layer that predicts a second token, which is not trained here
    "Qwen/Qwen3-Next-80B-A3B": _qwen3_next(48),
    "zai-org/GLM-4.5-Air": _shape(
        46, 4096, 10944, 96, 8, 151552, qkv_bias=True, experts=_glm4_5_experts(128, 1408, 1, 46, 1.0)
    ),
    "zai-org/GLM-4.5": _shape(
        92, 5120, 12288, 96, 8, 151552, qkv_bias=True, qk_norm=True, experts=_glm4_5_experts(160, 1536, 3, 92, 2.5)
    ),
    "meta-llama/Llama-3.1-8B": _LLAMA_3_1_8B,
    "meta-llama/Llama-3.1-70B": _shape(80, 8192, 28672, 64, 8, 128256),
    "mistralai/Mistral-7B-v0.1": _shape(32, 4096, 14336, 32, 8, 32000, max_positions=32768, windows=(4096,) * 32),
    "mistralai/Mistral-7B-v0.3": _shape(32, 4096, 14336, 32, 8, 32768, max_positions=32768),
    "mistralai/Mistral-Nemo-Base-2407": _shape(40, 5120, 14336, 32, 8, 131072),
    "mistralai/Mistral-Small-24B-Base-2501": _shape(40, 5120, 32768, 32, 8, 131072, max_positions=32768),
    "ByteDance-Seed/Seed-OSS-36B-Base": _shape(64, 5120, 27648, 80, 8, 155136, qkv_bias=True, max_positions=524288),
    "HuggingFaceTB/SmolLM3-3B": _shape(36, 2048, 11008, 16, 4, 128256, tied_embeddings=True, max_positions=65536),
    "baidu/ERNIE-4.5-0.3B-PT": _shape(18, 1024, 3072, 16, 2, 103424, tied_embeddings=True),
    "microsoft/phi-4": _shape(40, 5120, 17920, 40, 10, 100352, fuses_qkv=True, fuses_gate_up=True, max_positions=16384),
    "microsoft/Phi-4-mini-instruct": _shape(
        32,
        3072,
        8192,
        24,
        8,
        200064,
        tied_embeddings=True,
        fuses_qkv=True,
        fuses_gate_up=True,
        max_positions=4096,  # of LongRoPE's short factors
    ),
    # without the layers that predict a second token, which are not trained here
    "deepseek-ai/DeepSeek-V3": _DEEPSEEK_V3,
    "deepseek-ai/DeepSeek-R1": _DEEPSEEK_V3,
    "deepseek-ai/DeepSeek-V2-Lite": _deepseek(
        (27, 2048, 10944, 16, 102400),
        _deepseek_experts(64, 6, 1408, 1, 27, shared_ffn_size=2816, score="softmax", has_bias=False, normalised=False),
        max_positions=163840,
    ),
    "moonshotai/Moonlight-16B-A3B": _deepseek(
        (27, 2048, 11264, 16, 163840),
        _deepseek_experts(64, 6, 1408, 1, 27, shared_ffn_size=2816, scaling=2.446),
        max_positions=8192,
    ),
    "moonshotai/Kimi-K2": _deepseek(
        (61, 7168, 18432, 64, 163840),
        _deepseek_experts(384, 8, 2048, 1, 61, scaling=2.827),
        query_rank=1536,
    ),
    "zai-org/GLM-4.7-Flash": _deepseek(
        (47, 2048, 10240, 20, 154880),
        _deepseek_experts(64, 4, 1536, 1, 47, scaling=1.8),
        latents=LatentAttention(query_rank=768, key_value_rank=512, rotated_size=64, value_size=256),
        head_size=256,
        max_positions=202752,
    ),
    "openai/gpt-oss-20b": _gpt_oss(24, 32),
    "openai/gpt-oss-120b": _gpt_oss(36, 128),
    # distilled from R1 into Qwen2.5-Math-7B and Llama-3.1-8B: their shapes, another rotary base
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": _QWEN2_5_7B,
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": _LLAMA_3_1_8B,
}
"""Hub name of the base model -> shape."""


def untuned(name: str) -> str:
    """The name less the words that tell apart models of one shape; Mistral's have a version behind them."""
    return name.replace("-Instruct", "").replace("-Base", "")


def find_shape(path: str) -> ModelShape:
    """The shape of ``model.path``: a folder with a ``config.json``, that file, a GGUF file, or the name of a model.

    A folder named like a known model needs no ``config.json``, so that a plan can be made before the download; of any
    other model of the hub that file alone is downloaded.

    Raises:
        ConfigError: neither; the message names the known models.
    """
    if Path(path).name == "config.json":
        path = str(Path(path).parent)
    if is_gguf(path) or (Path(path) / "config.json").is_file():
        return named_architecture(path)
    short_names = {untuned(name.split("/")[1]): shape for name, shape in KNOWN_MODELS.items()}
    asked = untuned(Path(path).name)
    if asked in short_names:
        return short_names[asked]
    asked_hub = ""
    if is_hub_name(path):
        try:
            folder = hub_config(path)
        except ConfigError as error:
            asked_hub = f", nor had from the Hugging Face hub ({type(error.__cause__).__name__})"
        else:
            return read_architecture(folder)
    close = difflib.get_close_matches(asked, short_names, n=1)
    hint = f"perhaps you meant {close[0]!r}; " if close else ""
    raise ConfigError(
        f"model.path={path!r}: neither a folder with a config.json nor a model whose shape is known{asked_hub}; "
        f"{hint}a folder with nothing but its config.json suffices (hf download NAME config.json --local-dir FOLDER); "
        f"known: {', '.join(KNOWN_MODELS)}"
    )
