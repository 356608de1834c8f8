"""The Megatron model: a GPTModel that ends in hidden states, for an output layer fused with what reads it."""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from gtpo_megatron.actor import cpu_platform
from gtpo_megatron.actor.model import rotary, router
from gtpo_megatron.actor.model.core_attention import PREFIXES
from gtpo_megatron.actor.model.frozen_shards import emptied
from gtpo_megatron.actor.model.layer_specs import layer_specs
from gtpo_megatron.actor.model.transformer_config import padded_vocab_size, torch_dtype
from gtpo_megatron.config.model import ModelConfig
from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.data.packing import num_places
from gtpo_megatron.weights.architecture import Architecture
from gtpo_megatron.weights.reshard import chunk_prefix, table_name

EXPERT_BIAS = "expert_bias"
"""The one buffer of Megatron's layers that is a weight of the model: routers have it."""


def parameters_by_name(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    """Every parameter of a rank's model chunks, by its name in the name tables, whichever layers Megatron built."""
    return {
        chunk_prefix(number, len(chunks)) + table_name(name): parameter
        for number, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
    }


def weights_by_name(chunks: Sequence[torch.nn.Module]) -> dict[str, Tensor]:
    """Every tensor that the name tables have: the parameters' values, and the expert biases."""
    biases = {
        chunk_prefix(number, len(chunks)) + name: buffer
        for number, chunk in enumerate(chunks)
        for name, buffer in chunk.named_buffers()
        if name.endswith(f".{EXPERT_BIAS}")
    }
    return {name: parameter.data for name, parameter in parameters_by_name(chunks).items()} | biases


def mark_experts(chunks: Sequence[torch.nn.Module]) -> None:
    """Tells Megatron's data-parallel wrapper that experts' gradients are summed over ranks with the same experts.

    Its layers say so with more than one expert-parallel rank only. With one, and fewer expert-tensor than tensor ranks,
    0.16.1 would leave out the other tensor ranks' tokens. Saying it of every layout also gives the optimizer the same
    parts in every layout.

    Of their biases Megatron says besides what is true of an MLP's only: that tensor ranks have the same one, each with
    the gradient of its own tokens.
    """
    for name, parameter in parameters_by_name(chunks).items():
        if ".mlp.experts." in name:
            setattr(parameter, "allreduce", False)  # noqa: B010 - not a field that torch knows
            if name.endswith(".bias"):
                setattr(parameter, "sequence_parallel", False)  # noqa: B010
                setattr(parameter, "tensor_model_parallel", True)  # noqa: B010


def mark_sinks(chunks: Sequence[torch.nn.Module]) -> None:
    """Tells the clipping norm that tensor-parallel ranks have sinks of different heads.

    Neither Transformer Engine's attention nor ours says so of this parameter, and the norm would count rank 0's only.
    """
    for name, parameter in parameters_by_name(chunks).items():
        if name.endswith(".softmax_offset"):
            setattr(parameter, "tensor_model_parallel", True)  # noqa: B010 - not a field that torch knows


def fuse_weight_gradients(chunks: Sequence[torch.nn.Module]) -> None:
    """Lets Transformer Engine's layers add weight gradients to Megatron's float32 buffers within the product.

    Otherwise each is written in the weights' dtype first, and added by a second pass over both. Megatron's own switch,
    ``gradient_accumulation_fusion``, also asks its local layers, which refuse without a compiled extension of Apex's;
    of those only the embedding and an unused output layer are left here. Without effect where no layer can do it.
    """
    for chunk in chunks:
        for module in chunk.modules():
            if hasattr(module, "fuse_wgrad_accumulation"):
                setattr(module, "fuse_wgrad_accumulation", True)  # noqa: B010 - not a field that torch knows


class PolicyModel(GPTModel):
    """A GPTModel whose last stage returns the final hidden states ``[P, 1, H]`` (sharded under sequence parallelism).

    The output layer is applied by ``policy_head``, to scored positions only and in chunks.

    Attributes:
        packs_angles: layers are given the rotary angles of every packed token, so that Megatron's own rotary embedding
            turns all sequences by the same few kernels and not one after the other. Transformer Engine's does so by
            itself.
        local_rotary: the rotary embedding of some layers, beside Megatron's own; None: all have the same.
        embedding_factor: multiplies the embedding of every token, rounded to its dtype as transformers rounds it.
        logit_factor: multiplies the final hidden states, and so the logits.
    """

    packs_angles: bool = False
    local_rotary: Any
    embedding_factor: float = 1.0
    logit_factor: float = 1.0

    def _preprocess(self, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> tuple[Any, ...]:
        hidden, angles, *others = super()._preprocess(*args, packed_seq_params=packed_seq_params, **kwargs)
        if self.pre_process and self.embedding_factor != 1.0:
            hidden = hidden * torch.tensor(self.embedding_factor, dtype=hidden.dtype)
        if self.local_rotary is not None:
            angles = rotary.with_local_angles(angles, self.local_rotary)
        if self.packs_angles and angles is not None:
            starts = [num_places(prefix) for prefix in getattr(packed_seq_params, PREFIXES)]
            angles = rotary.packed_angles(angles, packed_seq_params.cu_seqlens_q.tolist(), starts)
        return hidden, angles, *others

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        if not self.post_process or self.logit_factor == 1.0:
            return hidden_states
        return hidden_states * self.logit_factor

    def output_weight(self) -> Tensor:
        """``[V / tp, H]``, of the last stage."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


def build_chunks(
    arch: Architecture,
    model: ModelConfig,
    parallel: ParallelConfig,
    config: TransformerConfig,
    *,
    adapted: bool = False,
    shared: bool = False,
) -> list[PolicyModel]:
    """This rank's part of the model, one chunk a virtual stage; uninitialised: a checkpoint must fill it.

    Args:
        arch: architecture of the model.
        model: its settings.
        parallel: the layout.
        config: Megatron's.
        adapted: linear layers will have adapters.
        shared: layers have no memory for their weights, which replicas will share: ``FrozenShards``.
    """
    return [
        _build_chunk(arch, model, parallel, config, index, adapted=adapted, shared=shared)
        for index in range(parallel.virtual_pipeline_size)
    ]


def _build_chunk(
    arch: Architecture,
    model: ModelConfig,
    parallel: ParallelConfig,
    config: TransformerConfig,
    index: int,
    *,
    adapted: bool,
    shared: bool,
) -> PolicyModel:
    vp_stage = index if parallel.virtual_pipeline_size > 1 else None
    specs = layer_specs(arch, config, vp_stage, adapted=adapted)
    if shared:
        for layer in {id(one): one for one in specs.layer_specs}.values():  # layers of a kind share one
            layer.module = emptied(layer.module)
    policy = PolicyModel(
        config=config,
        transformer_layer_spec=specs,
        vocab_size=padded_vocab_size(arch, parallel),
        max_sequence_length=model.max_sequence_tokens,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        parallel_output=True,
        share_embeddings_and_output_weights=arch.tied_embeddings,
        position_embedding_type="rope",
        rotary_percent=arch.rotary_fraction,
        rotary_base=arch.rope_theta,
        vp_stage=vp_stage,
    )
    rotary.set_frequencies(policy, arch)
    router.set_rule(policy, arch.experts)
    policy.packs_angles = not cpu_platform.has_transformer_engine()
    policy.embedding_factor, policy.logit_factor = arch.embedding_factor, arch.logit_factor
    return policy.to(device=cpu_platform.device(), dtype=torch_dtype(model))
