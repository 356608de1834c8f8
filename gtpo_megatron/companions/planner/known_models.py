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


def _everywhere(num: int, chosen: int, ffn: int, layers: int, **more: Any) -> Experts:
    """Experts in every layer."""
    return Experts(num_experts=num, experts_per_token=chosen, ffn_size=ffn, layers=(True,) * layers, **more)


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


_OLMO = {"qk_norm": True, "qk_norm_spans_heads": True}
_OLMO2 = {**_OLMO, "norm_placement": "post"}
_GLM4 = {"norm_placement": "sandwich", "fuses_gate_up": True, "max_positions": 32768}
_GEMMA3 = {"qk_norm": True, "norm_placement": "sandwich", "tied_embeddings": True}


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
        48, 2048, 6144, 32, 4, 151936, qk_norm=True, max_positions=40960, experts=_everywhere(128, 8, 768, 48)
    ),
    "Qwen/Qwen3-235B-A22B": _shape(
        94, 4096, 12288, 64, 4, 151936, qk_norm=True, max_positions=40960, experts=_everywhere(128, 8, 1536, 94)
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
        max_positions=131_072,
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
    "Qwen/Qwen1.5-MoE-A2.7B": _shape(
        24,
        2048,
        5632,
        16,
        16,
        151936,
        qkv_bias=True,
        max_positions=8192,
        experts=_everywhere(60, 4, 1408, 24, shared_ffn_size=5632, has_shared_gate=True, normalised=False),
    ),
    "mistralai/Mixtral-8x7B-v0.1": _shape(
        32, 4096, 14336, 32, 8, 32000, max_positions=32768, experts=_everywhere(8, 2, 14336, 32)
    ),
    "mistralai/Mixtral-8x22B-v0.1": _shape(
        56, 6144, 16384, 48, 8, 32000, max_positions=65536, experts=_everywhere(8, 2, 16384, 56)
    ),
    "google/gemma-3-1b": _shape(
        26,
        1152,
        6912,
        4,
        1,
        262144,
        head_size=256,
        max_positions=32768,
        windows=((512,) * 5 + (0,)) * 4 + (512,) * 2,
        **_GEMMA3,
    ),
    # of the text
    "google/gemma-3-27b": _shape(
        62, 5376, 21504, 32, 16, 262208, windows=((1024,) * 5 + (0,)) * 10 + (1024,) * 2, **_GEMMA3
    ),
    "allenai/OLMo-2-1124-7B": _shape(32, 4096, 11008, 32, 32, 100352, max_positions=4096, **_OLMO2),
    "allenai/Olmo-3-1025-7B": _shape(
        32, 4096, 11008, 32, 32, 100278, max_positions=65536, windows=(4096, 4096, 4096, 0) * 8, **_OLMO2
    ),
    "allenai/OLMoE-1B-7B-0924": _shape(
        16,
        2048,
        1024,
        16,
        16,
        50304,
        max_positions=4096,
        experts=_everywhere(64, 8, 1024, 16, normalised=False),
        **_OLMO,
    ),
    "ibm-granite/granite-3.3-8b-base": _shape(40, 4096, 12800, 32, 8, 49155, tied_embeddings=True),
    "zai-org/GLM-4-9B-0414": _shape(40, 4096, 13696, 32, 2, 151552, qkv_bias=True, **_GLM4),
    "zai-org/GLM-4-32B-0414": _shape(61, 6144, 23040, 48, 2, 151552, **_GLM4),
    "LGAI-EXAONE/EXAONE-4.0-32B": _shape(
        64, 5120, 27392, 40, 8, 102400, qk_norm=True, norm_placement="post", windows=(4096, 4096, 4096, 0) * 16
    ),
    "rednote-hilab/dots.llm1.base": _shape(
        62,
        4096,
        10944,
        32,
        32,
        152064,
        qk_norm=True,
        max_positions=32768,
        experts=_deepseek_experts(128, 6, 1408, 1, 62, shared_ffn_size=2816, scaling=2.5),
    ),
    "MiniMaxAI/MiniMax-M2": _shape(
        62,
        3072,
        1536,
        48,
        8,
        200064,
        max_positions=196608,
        experts=_everywhere(256, 8, 1536, 62, score="sigmoid", has_bias=True),
        **_OLMO,
    ),
    "deepseek-ai/DeepSeek-V2": _deepseek(
        (60, 5120, 12288, 128, 102400),
        _deepseek_experts(
            160,
            6,
            1536,
            1,
            60,
            shared_ffn_size=3072,
            score="softmax",
            has_bias=False,
            normalised=False,
            scaling=16.0,
            num_groups=8,
            groups_per_token=3,
            scored_per_group=1,
        ),
        query_rank=1536,
        max_positions=163840,
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
