"""Tiny random models that also see, with what transformers makes of their text alone."""

from typing import Any

import torch
import transformers

from tests.distributed.family_models import DELTA

TEXT = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 1,
}
TOWER = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
MROPE = {"rope_type": "default", "rope_theta": 300.0, "mrope_section": [2, 1, 1]}
QWEN_TOWER = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}

SEEING: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], str]] = {
    "gemma3": (
        "Gemma3",
        "gemma3_text",
        {"head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
        {**TOWER, "image_size": 28, "patch_size": 14},
        "Gemma3ForCausalLM",
    ),
    "mistral3": (
        "Mistral3",
        "mistral",
        {"head_dim": 8, "sliding_window": None},
        {**TOWER, "head_dim": 8, "image_size": 28, "patch_size": 14},
        "MistralForCausalLM",
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        "qwen2_5_vl_text",
        {"rope_parameters": {**MROPE}},
        QWEN_TOWER,
        "Qwen2ForCausalLM",
    ),
    "qwen3_5": (
        "Qwen3_5",
        "qwen3_5_text",
        {
            "head_dim": 16,
            **DELTA,
            "layer_types": ["linear_attention", "full_attention"],
            "rope_parameters": {**MROPE, "mrope_interleaved": True, "partial_rotary_factor": 0.5},
        },
        {**QWEN_TOWER, "num_position_embeddings": 16},
        "Qwen3_5ForCausalLM",
    ),
    "qwen3_vl": (
        "Qwen3VL",
        "qwen3_vl_text",
        {"head_dim": 8, "rope_parameters": {**MROPE, "mrope_interleaved": True}},
        {**QWEN_TOWER, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        "Qwen3ForCausalLM",
    ),
}
"""Name -> its classes in transformers, less ``Config`` and ``ForConditionalGeneration``; model type, keys of text and
of tower; class of the text alone."""


def make_seeing_folder(folder, name, *, more=None):
    """Saves the model; returns it, and its text part as a model of its own with the same weights."""
    torch.manual_seed(11)
    classes, model_type, text, tower, text_class = SEEING[name]
    kind = getattr(transformers, f"{classes}Config")
    whole = {**TEXT, **text, **(more or {})}
    config = kind(text_config={"model_type": model_type, **whole}, vision_config=tower, tie_word_embeddings=False)
    model = getattr(transformers, f"{classes}ForConditionalGeneration")(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    plain = {key: value for key, value in whole.items() if key != "rope_parameters"}
    if rope := whole.get("rope_parameters"):
        plain["rope_parameters"] = {key: value for key, value in rope.items() if not key.startswith("mrope")}
    kind = getattr(transformers, text_class)
    alone = kind(kind.config_class(**plain)).float().eval()
    found = {key.removeprefix("model.language_model."): tensor for key, tensor in model.state_dict().items()}
    state = {key if key.startswith("lm_head") else f"model.{key}": tensor for key, tensor in found.items()}
    missing = alone.load_state_dict(state, strict=False).missing_keys
    assert not missing, missing
    return model, alone
