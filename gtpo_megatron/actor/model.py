"""The Megatron model: a GPTModel that ends in hidden states, for an output layer fused with what reads it."""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from gtpo_megatron.actor import cpu_platform, rotary
from gtpo_megatron.actor.core_attention import PackedSDPA
from gtpo_megatron.config.model import ModelConfig
from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.weights.architecture import VOCAB_MULTIPLE, Architecture
from gtpo_megatron.weights.reshard import chunk_prefix, table_name


def parameters_by_name(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    """Every parameter of a rank's model chunks, by its name in the name tables, whichever layers Megatron built."""
    return {
        chunk_prefix(number, len(chunks)) + table_name(name): parameter
        for number, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
    }


class PolicyModel(GPTModel):
    """A GPTModel whose last stage returns the final hidden states ``[P, 1, H]`` (sharded under sequence parallelism).

    The output layer is applied by ``loss_adapter``, to scored positions only and in chunks.
    """

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states

    def output_weight(self) -> Tensor:
        """``[V / tp, H]``, of the last stage."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


class _RMSNorm(torch.nn.RMSNorm):
    """Megatron's local norm refuses sequence parallelism for want of this attribute.

    With it, ``finalize_model_grads`` sums the weight's gradient over the tensor-parallel ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010 - not a field that torch knows


def padded_vocab_size(arch: Architecture, config: ParallelConfig) -> int:
    """Rows of Megatron's embedding over all tensor-parallel ranks."""
    multiple = 1 if cpu_platform.is_cpu() else VOCAB_MULTIPLE
    return arch.padded_vocab_size(config.tensor_parallel_size, multiple)


def torch_dtype(config: ModelConfig) -> torch.dtype:
    """Of the weights in forward and backward."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.dtype]


def transformer_config(arch: Architecture, model: ModelConfig, parallel: ParallelConfig) -> TransformerConfig:
    """Megatron's configuration; fused kernels only where CUDA is there."""
    fused = not cpu_platform.is_cpu()
    dtype = torch_dtype(model)
    return TransformerConfig(
        num_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        ffn_hidden_size=arch.ffn_size,
        num_attention_heads=arch.num_heads,
        num_query_groups=arch.num_query_groups,
        kv_channels=arch.head_size,
        normalization="RMSNorm",
        layernorm_epsilon=arch.norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=arch.qkv_bias,
        qk_layernorm=arch.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        tensor_model_parallel_size=parallel.tensor_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_parallel_size,
        virtual_pipeline_model_parallel_size=(
            parallel.virtual_pipeline_size if parallel.virtual_pipeline_size > 1 else None
        ),
        context_parallel_size=parallel.context_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # every micro-batch has its own packed length; pipelines accept that with this dispatcher only
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        # the loss adapter divides by the global weight, once
        calculate_per_token_loss=True,
        **_recompute(model),
        # on gloo, freeing sent outputs and batched sends gave silently wrong results
        deallocate_pipeline_outputs=fused,
        batch_p2p_sync=fused,
        batch_p2p_comm=fused and parallel.virtual_pipeline_size == 1,
        # the interleaved schedule sends while it computes
        overlap_p2p_comm=parallel.virtual_pipeline_size > 1,
        use_cpu_initialization=not fused,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=fused,
        bias_activation_fusion=fused,
        bias_dropout_fusion=fused,
        # the local one asks the device for the sequences' bounds, twice a layer
        apply_rope_fusion=fused,
        persist_layer_norm=fused,
        cross_entropy_loss_fusion=False,
    )


def _recompute(model: ModelConfig) -> dict[str, Any]:
    """Megatron's words for what the backward pass makes again."""
    if model.recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if model.recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return {}


def build_chunks(
    arch: Architecture, model: ModelConfig, parallel: ParallelConfig, config: TransformerConfig
) -> list[PolicyModel]:
    """This rank's part of the model, one chunk a virtual stage; uninitialised: a checkpoint must fill it."""
    return [_build_chunk(arch, model, parallel, config, index) for index in range(parallel.virtual_pipeline_size)]


def _build_chunk(
    arch: Architecture, model: ModelConfig, parallel: ParallelConfig, config: TransformerConfig, index: int
) -> PolicyModel:
    vp_stage = index if parallel.virtual_pipeline_size > 1 else None
    policy = PolicyModel(
        config=config,
        transformer_layer_spec=_block_spec(config, vp_stage),
        vocab_size=padded_vocab_size(arch, parallel),
        max_sequence_length=model.max_sequence_tokens,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        parallel_output=True,
        share_embeddings_and_output_weights=arch.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=arch.rope_theta,
        vp_stage=vp_stage,
    )
    rotary.set_frequencies(policy, arch)
    return policy.to(device=cpu_platform.device(), dtype=torch_dtype(model))


def _block_spec(config: TransformerConfig, vp_stage: int | None) -> Any:
    """Transformer Engine's layers where CUDA is there; Megatron's local ones with packed attention elsewhere."""
    if not cpu_platform.is_cpu():
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=config.qk_layernorm)
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = _RMSNorm
    attention = layer.self_attention.submodules
    attention.core_attention = PackedSDPA
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = _RMSNorm
    layers = [spec] * get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=_RMSNorm)
