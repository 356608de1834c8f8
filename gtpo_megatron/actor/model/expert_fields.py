"""Fields of Megatron's configuration for a mixture of experts."""

from typing import Any

from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.weights.architecture import Architecture


def expert_fields(arch: Architecture, parallel: ParallelConfig, *, grouped: bool) -> dict[str, Any]:
    """Fields of Megatron's ``TransformerConfig``; none for a dense model.

    Megatron's own balancing is off: its losses count padding and depend on how tokens are cut into micro-batches and
    over ranks. ``router.PolicyRouter`` and ``ExpertBalance`` do it.

    Args:
        arch: architecture of the model.
        parallel: the layout.
        grouped: all experts of a rank are one grouped matrix product, which needs Transformer Engine.
    """
    experts = arch.experts
    if experts is None:
        return {}
    is_softmax = experts.score == "softmax"
    is_grouped_choice = experts.num_groups > 1 and experts.are_chosen_by_megatron
    return {
        "num_moe_experts": experts.num_experts,
        "moe_router_topk": experts.experts_per_token,
        "moe_ffn_hidden_size": experts.ffn_size,
        # of a list Megatron's checkpoints keep every layer apart, of a number they stack the layers
        "moe_layer_freq": 1 if arch.has_equal_layers else [int(has_experts) for has_experts in experts.layers],
        "moe_shared_expert_intermediate_size": experts.shared_ffn_size or None,
        "moe_shared_expert_gate": experts.has_shared_gate,
        # Megatron takes no expert bias with another; where the rule is ours, this is of no meaning
        "moe_router_score_function": "sigmoid" if experts.has_bias else experts.score,
        # softmax after the choice is softmax before it, divided by the chosen experts' sum
        "moe_router_pre_softmax": is_softmax and not experts.normalised,
        "moe_router_topk_scaling_factor": experts.scaling if experts.scaling != 1.0 else None,
        "moe_router_enable_expert_bias": experts.has_bias,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_num_groups": experts.num_groups if is_grouped_choice else None,
        "moe_router_group_topk": experts.groups_per_token if is_grouped_choice else None,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        # a fused router asks nobody which experts to take, and would leave a replay out without a word
        "moe_router_fusion": False,
        "moe_grouped_gemm": grouped,
        "moe_permute_fusion": grouped,
        "expert_model_parallel_size": parallel.expert_parallel_size,
        "expert_tensor_parallel_size": parallel.expert_tensor_parallel_size,
    }
