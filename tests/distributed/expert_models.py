"""Tiny random mixtures of experts, saved as transformers saves them."""

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.distributed.family_models import DELTA, DOTS1, GPT_OSS, MINIMAX_M2, config_class
from tests.distributed.mixtures import expert_biases
from tests.distributed.tiny_world import VOCAB

LATENTS = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "head_dim": 6,
    "v_head_dim": 8,
}

EXPERT_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": (
        "Qwen3Moe",
        {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True, "decoder_sparse_step": 1},
    ),
    # the first layer is dense; sigmoid, expert bias, groups, scaling, a shared expert, half of every head rotated
    "glm4_moe": (
        "Glm4Moe",
        {
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "first_k_dense_replace": 1,
            "attention_bias": True,
            "use_qk_norm": True,
        },
    ),
    # multi-latent attention with values narrower than keys; sigmoid, expert bias, groups, scaling, a shared expert
    "deepseek_v3": (
        "DeepseekV3",
        {
            **LATENTS,
            "q_lora_rank": 12,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "first_k_dense_replace": 1,
            "num_mtp_layers": 0,
            # keys of the hub's folders that transformers knows nothing of
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
        },
    ),
    # queries from the hidden state; softmax over all experts, whose weights are not divided by their sum
    "deepseek_v2": (
        "DeepseekV2",
        {
            **LATENTS,
            "q_lora_rank": None,
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    # groups, scored by their best expert alone
    "deepseek_v2_groups": (
        "DeepseekV2",
        {
            **LATENTS,
            "q_lora_rank": 12,
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "scoring_func": "softmax",
            "routed_scaling_factor": 16.0,
            "first_k_dense_replace": 1,
        },
    ),
    # two layers with delta nets, one with attention, a shared expert with a gate; two key heads, four value heads
    "qwen3_next": (
        "Qwen3Next",
        {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "shared_expert_intermediate_size": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 6,
            "linear_value_head_dim": 8,
            "full_attention_interval": 3,
            "rms_norm_eps": 1e-2,  # or that of a first output, which is next to nothing, would magnify every rounding
        },
    ),
    # the same in four tensors
    "qwen3_5": (
        "Qwen3_5Moe",
        {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "shared_expert_intermediate_size": 16,
            **DELTA,
            "full_attention_interval": 3,
            "rms_norm_eps": 1e-2,
        },
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        {"num_experts": 8, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 24, "decoder_sparse_step": 2},
    ),
    # three experts of two groups
    "dots1": ("Dots1", {**DOTS1, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2}),
    "mixtral": ("Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 16}),
    # norms over all heads
    "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 16, "pad_token_id": None}),
    # norms over all heads, and behind attention and experts
    "flex_olmo": (
        "FlexOlmo",
        {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": 16,
            "pad_token_id": None,
            "norm_topk_prob": True,
            "eos_token_id": 2,
        },
    ),
    # softmax with an expert bias; one layer dense
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {"moe_num_experts": 8, "moe_k": 5, "moe_num_shared_experts": 2, "pad_token_id": None},
    ),
    "minimax_m2": (
        "MiniMaxM2",
        {**MINIMAX_M2, "intermediate_size": 16, "num_local_experts": 8, "num_experts_per_tok": 4},
    ),
    "gpt_oss": ("GptOss", {**GPT_OSS, "intermediate_size": 16, "num_local_experts": 8, "num_experts_per_tok": 4}),
}
"""Family -> its classes in transformers, less ``Config`` and ``ForCausalLM``; changes to the shared configuration."""


def make_expert_model(folder: Path, family: str, *, num_layers: int = 4, **sizes: int) -> Any:
    """Saves the model and returns it; logits of its routers are so far apart that no rounding changes a choice."""
    torch.manual_seed(13)
    name, changes = EXPERT_FAMILIES[family]
    config = config_class(name)(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": num_layers,
            "num_attention_heads": 4,
            "tie_word_embeddings": False,
            "initializer_range": 0.2,
            "rms_norm_eps": 1e-6,
            "moe_intermediate_size": 16,
            "head_dim": 8,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            **changes,
            **sizes,
        },
    )
    config._experts_implementation = "eager"
    model = getattr(transformers, f"{name}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
        for parameter_name, parameter in model.named_parameters():
            # of gpt-oss, the first gates and up projections are beyond the clamp, here below it and there above
            if parameter_name.endswith("gate_up_proj_bias"):
                parameter[:, :2].mul_(160)
            elif parameter_name.endswith("conv1d.weight"):
                parameter.mul_(3)
            elif parameter_name.endswith("A_log"):
                parameter.uniform_(-2, 0)  # by its own a token would forget nearly all that was before
            elif parameter_name.endswith("down_proj") and f"{parameter_name}_bias" in dict(model.named_parameters()):
                parameter[:, 0].mul_(0.05)
        for bias in expert_biases(model).values():
            bias.copy_((0.1 if bias.ndim == 1 else 0.01) * torch.randn_like(bias))  # of softmax scores most are small
    model.save_pretrained(folder)
    return model
