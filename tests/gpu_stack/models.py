"""Small models of every family, without experts, with heads that fused attention takes, in what bfloat16 can hold."""

from pathlib import Path
from typing import Any

import torch

from tests.distributed.family_models import DEEPSEEK, FAMILIES, LLAMA3_ROPE, YARN_ROPE, FamilyModel, make_family_model

SHAPE = {
    "vocab_size": 197,  # odd, and more than the rows to which a GPU's tensor-parallel ranks pad theirs
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.05,
}
EXACT_FACTORS = {"embedding_multiplier": 4.0, "residual_multiplier": 0.5, "logits_scaling": 2.0}
"""In bfloat16."""
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"] * 2}
STACK_FAMILIES = {
    "qwen2": FamilyModel("Qwen2", SHAPE),
    "qwen2_tied": FamilyModel("Qwen2", SHAPE | {"tie_word_embeddings": True}),
    "qwen3": FamilyModel("Qwen3", SHAPE | {"head_dim": 32}),
    "llama3_1": FamilyModel("Llama", SHAPE | {"rope_parameters": {"rope_theta": 500.0, **LLAMA3_ROPE}}),
    "deepseek_dense": FamilyModel(
        "DeepseekV3",
        SHAPE
        | DEEPSEEK
        | {"q_lora_rank": 96, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
        | {"first_k_dense_replace": 4, "num_mtp_layers": 0},
    ),
    "qwen3_next_dense": FamilyModel(
        "Qwen3Next",
        SHAPE
        | {"head_dim": 32, "full_attention_interval": 2, "mlp_only_layers": [0, 1, 2, 3], "rms_norm_eps": 1e-2}
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32}
        | {"linear_value_head_dim": 64, "pad_token_id": None},
    ),
    "qwen2_yarn": FamilyModel("Qwen2", SHAPE | {"rope_parameters": {"rope_theta": 20.0, **YARN_ROPE}}, is_old=True),
    "mistral_window": FamilyModel("Mistral", SHAPE | {"sliding_window": 4}),
    "smollm3": FamilyModel("SmolLM3", SHAPE | {"no_rope_layers": [1, 0] * 2, "pad_token_id": None}),
    "ernie4_5": FamilyModel("Ernie4_5", SHAPE | {"head_dim": 32, "pad_token_id": None}),
    "phi4": FamilyModel("Phi3", SHAPE | {"pad_token_id": None}),
    "granite": FamilyModel("Granite", SHAPE | FAMILIES["granite"].changes | EXACT_FACTORS),
    "glm4": FamilyModel("Glm4", SHAPE | {"head_dim": 32, "pad_token_id": None}),
    "glm": FamilyModel("Glm", SHAPE | {"head_dim": 32, "attention_bias": True, "pad_token_id": None}),
    "hunyuan": FamilyModel("HunYuanDenseV1", SHAPE | {"head_dim": 64, "pad_token_id": None}),
    "olmo3": FamilyModel("Olmo3", SHAPE | FAMILIES["olmo3"].changes | ALTERNATING),
    "gemma3": FamilyModel("Gemma3", SHAPE | FAMILIES["gemma3"].changes | {"head_dim": 32} | ALTERNATING),
}


def make_model(folder: Path, name: str) -> Any:
    """Saves the model in bfloat16 and returns it in float32: both sides have the same weights."""
    return make_family_model(folder, STACK_FAMILIES[name], noise=0.01, dtype=torch.bfloat16)
