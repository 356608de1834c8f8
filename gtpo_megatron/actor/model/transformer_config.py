"""Megatron's configuration of a model, from its shape, its dtype and the layout of the ranks."""

from typing import Any

import torch
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.transformer.transformer_config import TransformerConfig

from gtpo_megatron.actor import cpu_platform
from gtpo_megatron.actor.model import rotary
from gtpo_megatron.actor.model.expert_fields import expert_fields
from gtpo_megatron.config.model import ModelConfig
from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.weights.architecture import VOCAB_MULTIPLE, Architecture


def padded_vocab_size(arch: Architecture, config: ParallelConfig) -> int:
    """Rows of Megatron's embedding over all tensor-parallel ranks."""
    multiple = 1 if cpu_platform.is_cpu() else VOCAB_MULTIPLE
    return arch.padded_vocab_size(config.tensor_parallel_size, multiple)


def torch_dtype(config: ModelConfig) -> torch.dtype:
    """Dtype of the weights in forward and backward."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.dtype]


def transformer_config(arch: Architecture, model: ModelConfig, parallel: ParallelConfig) -> TransformerConfig:
    """Megatron's configuration; fused kernels with Transformer Engine only."""
    has_gpu, fused = not cpu_platform.is_cpu(), cpu_platform.has_transformer_engine()
    dtype = torch_dtype(model)
    config = TransformerConfig(
        num_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        ffn_hidden_size=arch.ffn_size,
        num_attention_heads=arch.num_heads,
        num_query_groups=arch.num_query_groups,
        kv_channels=arch.head_size,
        normalization="RMSNorm",
        layernorm_epsilon=arch.norm_eps,
        gated_linear_unit=True,
        **_activation(arch),
        add_bias_linear=arch.has_sinks,
        add_qkv_bias=arch.qkv_bias,
        qk_layernorm=arch.qk_norm and not arch.norms_rotated_heads,
        attention_output_gate=arch.has_output_gate,
        layernorm_zero_centered_gamma=arch.norms_from_one,
        softmax_type="learnable" if arch.has_sinks else "vanilla",
        softmax_scale=arch.score_scale,
        rotary_interleaved=arch.rotates_neighbours,
        # one number a layer, 1 where nothing is rotated
        no_rope_freq=[int(layer in arch.unrotated_layers) for layer in range(arch.num_layers)],
        # one size, and a 1 for each layer that has it; the size counts the tokens before
        window_size=(max(arch.windows) - 1, 0) if arch.windows else None,
        window_attn_skip_freq=[int(window > 0) for window in arch.windows] or None,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        tensor_model_parallel_size=parallel.tensor_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_parallel_size,
        virtual_pipeline_model_parallel_size=(
            parallel.virtual_pipeline_size if parallel.virtual_pipeline_size > 1 else None
        ),
        num_layers_in_last_pipeline_stage=parallel.last_stage_layers,
        context_parallel_size=parallel.context_parallel_size,
        cp_comm_type="a2a" if arch.exchanges_heads else "p2p",
        sequence_parallel=parallel.sequence_parallel,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # every micro-batch has its own packed length; pipelines accept that with this dispatcher only
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        # the loss adapter divides by the global weight, once
        calculate_per_token_loss=True,
        **expert_fields(arch, parallel, grouped=fused),
        **_recompute(model),
        # on gloo, freeing sent outputs and batched sends gave silently wrong results
        deallocate_pipeline_outputs=has_gpu,
        # would wait for the device after every exchange: Megatron's remedy for old versions of torch
        batch_p2p_sync=False,
        batch_p2p_comm=has_gpu and parallel.virtual_pipeline_size == 1,
        # the interleaved schedule sends while it computes
        overlap_p2p_comm=parallel.virtual_pipeline_size > 1,
        use_cpu_initialization=not has_gpu,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=fused,
        bias_activation_fusion=fused and arch.activation == "silu",
        bias_dropout_fusion=fused and not arch.has_sinks,  # grouped experts refuse both
        # the local one asks the device for the sequences' bounds, twice a layer, but knows a factor of attention and,
        # in 0.16 too, pairs of neighbours
        apply_rope_fusion=fused and rotary.attention_factor(arch) == 1.0 and not arch.rotates_neighbours,
        persist_layer_norm=fused,
        cross_entropy_loss_fusion=False,
    )
    rotary.set_attention_factor(config, arch)
    return config


def gelu_tanh(gate: torch.Tensor) -> torch.Tensor:
    """GELU by its approximation with tanh, which Megatron has within a fused kernel only."""
    return torch.nn.functional.gelu(gate, approximate="tanh")


def _activation(arch: Architecture) -> dict[str, Any]:
    """Of the gate, and what is done to gate and up projection before."""
    clamp = 0.0 if arch.experts is None else arch.experts.clamp
    if not clamp:
        return {"activation_func": torch.nn.functional.silu if arch.activation == "silu" else gelu_tanh}
    return {"activation_func": quick_gelu, "glu_linear_offset": 1.0, "activation_func_clamp_value": clamp}


def _recompute(model: ModelConfig) -> dict[str, Any]:
    """Megatron's words for what the backward pass makes again."""
    if model.recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if model.recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    if model.recompute == "experts":
        return {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    return {}
