"""Shapes and batches: those of Qwen2.5's and Qwen3's models on a GPU, and small ones of the same kinds."""

from dataclasses import dataclass
from typing import Any, Literal

import torch

from gtpo_megatron.config.adapter import AdapterConfig

ADAPTER = AdapterConfig(rank=32, alpha=32.0)
"""Of the recipes."""


@dataclass(frozen=True, kw_only=True)
class HeadSize:
    """An output layer.

    Attributes:
        name: model, with the tensor-parallel ranks that share its vocabulary.
        tokens: number of tokens scored together.
        hidden: width.
        vocab: rows of one rank.
        chunk: number of tokens whose logits are made together.
    """

    name: str
    tokens: int
    hidden: int
    vocab: int
    chunk: int


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """A model, and a batch of equally long responses.

    Attributes:
        name: model whose widths it has.
        config: content of its ``config.json``.
        responses: number of responses of a step.
        prompt_tokens: length of each prompt.
        response_tokens: length of each response.
        micro_batch_tokens: tokens packed together.
        adapter: adapters, trained in the place of all weights.
        recompute: activations that the backward pass makes again.
    """

    name: str
    config: dict[str, Any]
    responses: int
    prompt_tokens: int
    response_tokens: int
    micro_batch_tokens: int
    adapter: AdapterConfig = AdapterConfig()
    recompute: Literal["none", "full"] = "none"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Everything that the parts measure.

    Attributes:
        device: device of all measurements.
        heads: output layers.
        models: models of the actor, two layers each.
        whole: one with all of its layers, whose rates are measured too.
        adapted: whole ones that low-rank adapters are trained over.
        dtype: element type of the models.
        checked_responses: size of the batch whose gradients are compared.
        bucket_bytes: size of a push's buckets.
        peer_step: key of ``benchmarks.peer_sizes.SIZES``, of a step beside TRL's.
        rounds: timed repetitions, after ``warm_rounds``.
        warm_rounds: repetitions that are not timed.
    """

    device: torch.device
    heads: tuple[HeadSize, ...]
    models: tuple[ModelSize, ...]
    whole: ModelSize
    adapted: tuple[ModelSize, ...]
    dtype: str
    checked_responses: int
    bucket_bytes: int
    peer_step: Literal["tiny", "0.5b"]
    rounds: int
    warm_rounds: int


def _config(hidden: int, ffn: int, heads: int, groups: int, vocab: int, *, tied: bool) -> dict[str, Any]:
    """Of a Qwen2 of two layers."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": vocab,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": tied,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "bos_token_id": None,
        "eos_token_id": 0,
    }


def _windowed(hidden: int, ffn: int, heads: int, groups: int, vocab: int, *, window: int) -> dict[str, Any]:
    """Of a Mistral of two layers, in which a token attends to ``window`` tokens."""
    dense = _config(hidden, ffn, heads, groups, vocab, tied=False)
    del dense["use_sliding_window"]
    return dense | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "head_dim": hidden // heads,
        "sliding_window": window,
    }


def _mixture(
    hidden: int, ffn: int, heads: int, groups: int, vocab: int, *, experts: int, chosen: int
) -> dict[str, Any]:
    """Of a Qwen3-MoE of two layers; ``ffn``: an expert's width."""
    dense = _config(hidden, ffn, heads, groups, vocab, tied=False)
    return dense | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "head_dim": 128 if hidden > 128 else hidden // heads,
        "attention_bias": False,
        "num_experts": experts,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": ffn,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _latent(hidden: int, ffn: int, heads: int, vocab: int, *, latent: int, size: int, experts: int) -> dict[str, Any]:
    """Of a DeepSeek-V3 without a query latent, as Moonlight is; of two layers the first is dense.

    ``latent``: of keys and values; ``size``: of a head's elements, of which half as many more are rotated.
    """
    return _mixture(hidden, ffn, heads, heads, vocab, experts=experts, chosen=experts // 10 or 2) | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "q_lora_rank": None,
        "kv_lora_rank": latent,
        "qk_nope_head_dim": size,
        "qk_rope_head_dim": size // 2,
        "v_head_dim": size,
        "head_dim": size // 2,
        "n_routed_experts": experts,
        "n_shared_experts": 2,
        "intermediate_size": 8 * ffn,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.446,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "rope_interleave": True,
        "rope_theta": 50000.0,
        "rms_norm_eps": 1e-6,
    }


def sizes_of(device: torch.device, *, small: bool) -> Sizes:
    """Those of the models, or small ones that a core computes in seconds."""
    if small:
        batch: dict[str, Any] = {"responses": 8, "prompt_tokens": 8, "response_tokens": 24, "micro_batch_tokens": 64}
        return Sizes(
            device=device,
            heads=(HeadSize(name="small", tokens=64, hidden=48, vocab=1500, chunk=32),),
            models=(
                ModelSize(name="small, tied", config=_config(128, 160, 4, 2, 503, tied=True), **batch),
                ModelSize(name="small", config=_config(128, 160, 4, 2, 503, tied=False), **batch),
                ModelSize(name="small window", config=_windowed(128, 160, 4, 2, 503, window=8), **batch),
                ModelSize(name="small mixture", config=_mixture(128, 64, 4, 2, 503, experts=8, chosen=2), **batch),
                ModelSize(name="small latent", config=_latent(128, 64, 4, 503, latent=32, size=16, experts=8), **batch),
            ),
            whole=ModelSize(
                name="small, whole", config=_config(128, 160, 4, 2, 503, tied=True) | {"num_hidden_layers": 4}, **batch
            ),
            adapted=(
                ModelSize(
                    name="small, adapters",
                    config=_config(128, 160, 4, 2, 503, tied=False),
                    adapter=AdapterConfig(rank=8),
                    **batch,
                ),
                ModelSize(
                    name="small, adapters, all recomputed",
                    config=_config(128, 160, 4, 2, 503, tied=False) | {"num_hidden_layers": 16},
                    adapter=AdapterConfig(rank=8),
                    recompute="full",
                    **batch,
                ),
            ),
            dtype="bfloat16",
            checked_responses=4,
            bucket_bytes=1 << 16,
            peer_step="tiny",
            rounds=2,
            warm_rounds=1,
        )
    batch = {"responses": 32, "prompt_tokens": 256, "response_tokens": 1792, "micro_batch_tokens": 8192}
    half, seven = _config(896, 4864, 14, 2, 151936, tied=True), _config(3584, 18944, 28, 4, 152064, tied=False)
    mixture = _mixture(2048, 768, 32, 4, 151936, experts=128, chosen=8)
    latent = _latent(2048, 1408, 16, 163840, latent=512, size=128, experts=64)
    return Sizes(
        device=device,
        heads=(
            HeadSize(name="32B, a quarter of the vocabulary", tokens=8192, hidden=5120, vocab=38016, chunk=4096),
            HeadSize(name="7B, the whole vocabulary", tokens=8192, hidden=3584, vocab=152064, chunk=4096),
        ),
        models=(
            ModelSize(name="0.5B widths", config=half, **batch),
            ModelSize(name="7B widths", config=seven, **batch),
            ModelSize(name="0.5B widths, a window", config=_windowed(896, 4864, 14, 2, 32768, window=512), **batch),
            ModelSize(name="30B-A3B widths", config=mixture, **batch),
            ModelSize(name="Moonlight widths", config=latent, **batch),
        ),
        whole=ModelSize(name="0.5B whole", config=half | {"num_hidden_layers": 24}, **batch),
        adapted=(
            ModelSize(
                name="7B whole, adapters",
                config=seven | {"num_hidden_layers": 28},
                adapter=ADAPTER,
                **batch | {"responses": 16},
            ),
            ModelSize(
                name="32B whole, adapters, all recomputed",
                config=_config(5120, 27648, 40, 8, 152064, tied=False) | {"num_hidden_layers": 64},
                adapter=ADAPTER,
                recompute="full",
                **batch | {"responses": 8},
            ),
        ),
        dtype="bfloat16",
        checked_responses=4,
        bucket_bytes=512 << 20,
        peer_step="0.5b",
        rounds=5,
        warm_rounds=2,
    )
