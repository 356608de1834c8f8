"""Tiny random models of every family, saved as their makers save them, beside what transformers makes of them."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.distributed.mixtures import expert_biases

VOCAB = 53  # odd: every tensor-parallel layout pads it

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,  # so short that 13 positions tell the stretched frequencies from others
}

YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 6}

LONG_ROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.3, 2.0],  # three pairs of a head of 8 elements
    "long_factor": [1.0, 2.0, 8.0],
    "partial_rotary_factor": 0.75,
}


@dataclass(frozen=True)
class FamilyModel:
    """A model to make.

    Attributes:
        name: of its classes in transformers, less ``Config`` and ``ForCausalLM``.
        changes: to the shared configuration.
        is_old: config.json spells the dtype and the rotary embedding as transformers 4 did.
    """

    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    is_old: bool = False


DEEPSEEK = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    # of these the hub's folders have keys, and transformers knows nothing
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
"""Multi-latent attention whose values are narrower than keys."""

DOTS1 = {
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "sliding_window": None,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
"""Qwen3's attention, DeepSeek V3's experts."""

MINIMAX_M2 = {
    "num_experts_per_tok": 2,
    "head_dim": 8,
    "rotary_dim": 4,
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "bos_token_id": None,
    "eos_token_id": 2,
}
"""Norms over all heads, half of each rotated, an expert bias."""

GPT_OSS = {
    "num_experts_per_tok": 2,
    "sliding_window": 4,
    "rms_norm_eps": 1e-5,
    "pad_token_id": None,
    "rope_parameters": {**YARN_ROPE, "rope_theta": 20.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
}
"""Sinks, biases on every projection, a window in every other layer, a clamped gate."""

DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 8,
    "pad_token_id": None,
}
"""Gated delta nets, two value heads to a key head."""

FAMILIES = {
    "qwen2": FamilyModel("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": FamilyModel("Qwen3", {"tie_word_embeddings": True, "head_dim": 16}),
    "qwen3_untied": FamilyModel("Qwen3", {"head_dim": 4}),
    "llama3": FamilyModel("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "llama3_1": FamilyModel("Llama", {"rope_parameters": {"rope_theta": 500.0, **LLAMA3_ROPE}}),
    "r1_distill_qwen": FamilyModel(
        "Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}}, is_old=True
    ),
    "r1_distill_llama": FamilyModel("Llama", {"rope_parameters": {"rope_theta": 500.0, **LLAMA3_ROPE}}, is_old=True),
    "mistral": FamilyModel("Mistral", {"head_dim": 16, "sliding_window": None}),
    "mistral_window": FamilyModel("Mistral", {"sliding_window": 4}),
    # by default transformers' embedding holds the row of a padding token still
    "seed_oss": FamilyModel("SeedOss", {"head_dim": 16, "pad_token_id": None}),
    "smollm3": FamilyModel("SmolLM3", {"tie_word_embeddings": True, "no_rope_layers": [0, 1], "pad_token_id": None}),
    "ernie4_5": FamilyModel("Ernie4_5", {"head_dim": 16, "tie_word_embeddings": True, "pad_token_id": None}),
    "hunyuan": FamilyModel(
        "HunYuanDenseV1",
        {
            "head_dim": 8,
            "pad_token_id": None,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 20.0, "alpha": 9.0, "factor": 1.0},
        },
    ),
    "helium": FamilyModel("Helium", {"head_dim": 8, "pad_token_id": None}),
    "phi4": FamilyModel("Phi3", {"pad_token_id": None}),
    "phi4_mini": FamilyModel(
        "Phi3",
        {
            "tie_word_embeddings": True,
            "pad_token_id": None,
            "sliding_window": 128,  # as long as the context, so that nothing is outside
            "original_max_position_embeddings": 64,
            "rope_parameters": {"rope_theta": 20.0, **LONG_ROPE},
        },
    ),
    # queries grow from position 64 on, which no response reaches
    "ministral3": FamilyModel(
        "Ministral3",
        {
            "head_dim": 16,
            "pad_token_id": None,
            "rope_parameters": {
                **YARN_ROPE,
                "rope_theta": 20.0,
                "original_max_position_embeddings": 64,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "granite": FamilyModel(
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "logits_scaling": 4.0,
            "residual_multiplier": 0.3,
            "attention_multiplier": 0.2,
            "pad_token_id": None,
        },
    ),
    "glm4": FamilyModel("Glm4", {"head_dim": 8, "pad_token_id": None}),
    "glm": FamilyModel("Glm", {"head_dim": 8, "attention_bias": True, "pad_token_id": None}),
    # a window in the first layer, frequencies stretched in both
    "cwm": FamilyModel(
        "Cwm",
        {
            "head_dim": 16,
            "pad_token_id": None,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {"rope_theta": 500.0, **LLAMA3_ROPE},
        },
    ),
    "olmo2": FamilyModel("Olmo2", {"pad_token_id": None}),
    # a window in the first layer, the stretched embedding in the second
    "olmo3": FamilyModel(
        "Olmo3",
        {
            "pad_token_id": None,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
                "full_attention": {"rope_theta": 300.0, **YARN_ROPE},
            },
        },
    ),
    "exaone4": FamilyModel(
        "Exaone4", {"head_dim": 16, "sliding_window": 4, "sliding_window_pattern": 2, "pad_token_id": None}
    ),
    "gemma": FamilyModel(
        "Gemma", {"head_dim": 16, "tie_word_embeddings": True, "pad_token_id": None, "hidden_act": "gelu_pytorch_tanh"}
    ),
    "gemma3": FamilyModel(
        "Gemma3",
        {
            "head_dim": 16,
            "tie_word_embeddings": True,
            "pad_token_id": None,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 20,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 300.0},
            },
        },
    ),
    "qwen3_yarn": FamilyModel("Qwen3", {"head_dim": 8, "rope_parameters": {"rope_theta": 20.0, **YARN_ROPE}}),
    "qwen2_yarn": FamilyModel("Qwen2", {"rope_parameters": {"rope_theta": 20.0, **YARN_ROPE}}, is_old=True),
    "qwen3_5": FamilyModel(
        "Qwen3_5",
        # that epsilon, or that of a first output, which is next to nothing, would magnify every rounding
        {"head_dim": 8, **DELTA, "layer_types": ["linear_attention", "full_attention"], "rms_norm_eps": 1e-2},
    ),
    # multi-latent attention without experts
    "deepseek_dense": FamilyModel(
        "DeepseekV3",
        {
            **DEEPSEEK,
            "q_lora_rank": 12,
            "num_mtp_layers": 0,
            "first_k_dense_replace": 2,
            "rope_parameters": {"rope_theta": 20.0, **YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 0.7},
        },
    ),
}

MIXTURES = {
    "qwen3_moe": FamilyModel(
        "Qwen3Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "head_dim": 8,
            "norm_topk_prob": True,
        },
    ),
    "qwen3_moe_mixed": FamilyModel(
        "Qwen3Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "head_dim": 8,
            "mlp_only_layers": [1],
        },
    ),
    "olmoe": FamilyModel(
        "Olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 16, "pad_token_id": None}
    ),
    "flex_olmo": FamilyModel(
        "FlexOlmo", {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 16, "pad_token_id": None}
    ),
    "ernie4_5_moe": FamilyModel(
        "Ernie4_5_Moe",
        {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_num_shared_experts": 1,
            "moe_intermediate_size": 16,
            "pad_token_id": None,
        },
    ),
    "minimax_m2": FamilyModel("MiniMaxM2", {**MINIMAX_M2, "intermediate_size": 16, "num_local_experts": 4}),
    "glm4_moe": FamilyModel(
        "Glm4Moe",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "head_dim": 8,
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    ),
    "qwen2_moe": FamilyModel(
        "Qwen2Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
        },
    ),
    "dots1": FamilyModel("Dots1", {**DOTS1, "head_dim": 8}),
    "mixtral": FamilyModel("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 16}),
    "deepseek_v3": FamilyModel("DeepseekV3", {**DEEPSEEK, "q_lora_rank": 12, "num_mtp_layers": 0}),
    "glm4_moe_lite": FamilyModel("Glm4MoeLite", {**DEEPSEEK, "q_lora_rank": 12}),
    "qwen3_next": FamilyModel(
        "Qwen3Next",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 6,
            "linear_value_head_dim": 8,
            "full_attention_interval": 2,
        },
    ),
    "qwen3_5_moe": FamilyModel(
        "Qwen3_5Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "head_dim": 8,
            **DELTA,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "gpt_oss": FamilyModel("GptOss", {**GPT_OSS, "intermediate_size": 16, "head_dim": 16, "num_local_experts": 4}),
    "deepseek_v2": FamilyModel(
        "DeepseekV2",
        {
            **DEEPSEEK,
            "q_lora_rank": None,
            "scoring_func": "softmax",
            "topk_method": "greedy",
            "norm_topk_prob": False,
            "n_group": 1,
        },
    ),
}
"""Mixtures of experts in all layers, all but the last, all but the first; these also have shared experts, and all but
DeepSeek V2 an expert bias and groups; gpt-oss's has neither."""


VLLMS_OWN = ("scoring_func", "topk_method", "use_routing_bias", "rotary_dim")
"""Keys of ``config.json`` that transformers may drop and vLLM goes by."""

HAVE_TOWERS = ("Gemma3", "Qwen3_5", "Qwen3_5Moe")


def make_family_model(
    folder: Path, family: FamilyModel, *, dtype: torch.dtype = torch.float32, noise: float = 0.05
) -> Any:
    """Saves the model and returns it in float32; weights large enough that nothing is nearly uniform."""
    torch.manual_seed(5)
    config = _config(family)
    model = getattr(transformers, f"{family.name}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    model.to(dtype)
    for bias in expert_biases(model).values():  # float32 in every folder
        bias.data = 0.1 * torch.randn(bias.shape)
    model.save_pretrained(folder)
    if family.is_old:
        spell_as_before(folder / "config.json")
    return model.float()


def config_class(name: str) -> Any:
    """Of a family; those of models that see have another for their text."""
    return getattr(transformers, f"{name}TextConfig" if name in HAVE_TOWERS else f"{name}Config")


def family_config(family: FamilyModel) -> dict[str, Any]:
    """``config.json`` of the family's model."""
    raw = json.loads(_config(family).to_json_string(use_diff=False))
    own = {key: value for key, value in family.changes.items() if key in VLLMS_OWN}
    return raw | own | {"architectures": [f"{family.name}ForCausalLM"]}


def _config(family: FamilyModel) -> Any:
    return config_class(family.name)(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "tie_word_embeddings": False,
            "initializer_range": 0.2,
            "rms_norm_eps": 1e-6,
            **family.changes,
        }
    )


def spell_as_before(path: Path) -> None:
    """``rope_theta`` and ``rope_scaling`` side by side, ``torch_dtype``, and what else such folders hold."""
    raw = json.loads(path.read_text(encoding="utf-8"))
    rope = raw.pop("rope_parameters")
    raw["rope_theta"] = rope.pop("rope_theta")
    raw["rope_scaling"] = rope if rope["rope_type"] != "default" else None
    raw["torch_dtype"] = raw.pop("dtype")
    raw |= {"pretraining_tp": 1, "sliding_window": 4096, "use_sliding_window": False, "use_mrope": False}
    path.write_text(json.dumps(raw), encoding="utf-8")
