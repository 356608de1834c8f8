"""Modules from which Megatron builds the layers of a pipeline stage."""

import copy
import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from gtpo_megatron.actor import cpu_platform
from gtpo_megatron.actor.model.core_attention import PackedSDPA
from gtpo_megatron.actor.model.delta_net import DeltaLayers, GatedDeltaNet
from gtpo_megatron.actor.model.latent_attention import LatentLayers, LatentSelfAttention
from gtpo_megatron.actor.model.router import PolicyRouter
from gtpo_megatron.weights.architecture import Architecture

logger = logging.getLogger(__name__)


class _RMSNorm(torch.nn.RMSNorm):
    """An RMSNorm for sequence parallelism, which Megatron's local norm refuses.

    Its weight has the attribute by which ``finalize_model_grads`` knows whose gradients to sum over the tensor-parallel
    ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self._from_one: bool = config.layernorm_zero_centered_gamma
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010 - not a field that torch knows

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of the last dimension; a factor of ``1 + w`` is made and applied in float32, as transformers does."""
        if not self._from_one:
            return super().forward(hidden)
        normed = torch.nn.functional.rms_norm(hidden.float(), self.normalized_shape, 1 + self.weight.float(), self.eps)
        return normed.to(hidden.dtype)


class _OwnOutput(RowParallelLinear):
    """An expert's projection whose output is no view, so that Megatron may add the bias in place."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, bias = super().forward(*args, **kwargs)
        return output.clone(), bias


def layer_specs(arch: Architecture, config: TransformerConfig, vp_stage: int | None, *, adapted: bool) -> Any:
    """Transformer Engine's layers if it is there; else Megatron's local ones with torch's attention.

    Args:
        arch: of the model.
        config: Megatron's.
        vp_stage: virtual stage of the chunk; None if there is one.
        adapted: linear layers will have adapters, which read the layers' own inputs.
    """
    if not cpu_platform.has_transformer_engine():
        if not cpu_platform.is_cpu():
            logger.warning("Transformer Engine is not installed: layers are Megatron's own, slower and larger")
        return _local(arch, config, vp_stage)
    if config.num_moe_experts is None:
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

        found = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
        layers = [found]
    else:
        found = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
        layers = found.layer_specs
    for layer in layers:
        _use_policy_router(layer)
        if adapted:
            _unfuse_norms(layer)
        if arch.latents is not None:
            from megatron.core.extensions import transformer_engine as te

            _use_latents(
                layer,
                arch,
                LatentLayers(te.TENorm, te.TEColumnParallelLinear, te.TERowParallelLinear, te.TEDotProductAttention),
            )
    if arch.delta is not None:
        from megatron.core.extensions import transformer_engine as te

        classes = DeltaLayers(te.TENorm, te.TEColumnParallelLinear, te.TERowParallelLinear)
        found.layer_specs = _with_delta_nets(layers, arch, config, vp_stage, classes)
    return found


def _local(arch: Architecture, config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    num_layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    dense = _local_layer(arch, config, num_experts=None)
    layers = [dense] * num_layers
    if config.num_moe_experts is not None:
        mixture = _local_layer(arch, config, num_experts=config.num_moe_experts)
        first = get_transformer_layer_offset(config, vp_stage=vp_stage)
        kinds = config.moe_layer_freq if isinstance(config.moe_layer_freq, list) else [1] * config.num_layers
        layers = [mixture if has_experts else dense for has_experts in kinds[first : first + num_layers]]
    if arch.delta is not None:
        classes = DeltaLayers(_RMSNorm, ColumnParallelLinear, RowParallelLinear)
        layers = _with_delta_nets(layers, arch, config, vp_stage, classes)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=_RMSNorm)


def _local_layer(arch: Architecture, config: TransformerConfig, *, num_experts: int | None) -> Any:
    spec = get_gpt_layer_local_spec(
        num_experts=num_experts, moe_grouped_gemm=False, normalization="RMSNorm", qk_layernorm=config.qk_layernorm
    )
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = _RMSNorm
    attention = layer.self_attention.submodules
    attention.core_attention = PackedSDPA
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = _RMSNorm
    if num_experts is not None:
        _use_policy_router(spec)
        _keep_apart(layer, "pre_mlp_layernorm.")
        if config.add_bias_linear:
            _submodules(_submodules(layer.mlp).experts).linear_fc2 = _OwnOutput
    if arch.latents is not None:
        _use_latents(spec, arch, LatentLayers(_RMSNorm, ColumnParallelLinear, RowParallelLinear, PackedSDPA))
        _keep_apart(layer, "input_layernorm.")
    return spec


def _keep_apart(layer: Any, norm: str) -> None:
    """Checkpoints name norms as Transformer Engine does, which fuses them into the layers behind, but not this one."""
    keys = layer.sharded_state_dict_keys_map
    layer.sharded_state_dict_keys_map = {ours: fused for ours, fused in keys.items() if ours != norm}


def _unfuse_norms(layer: Any) -> None:
    """Takes the norms out of Transformer Engine's linear layers, which otherwise are given what is not normalised yet.

    Checkpoints name them as before.
    """
    from megatron.core.extensions import transformer_engine as te

    attention, mlp = layer.submodules.self_attention.submodules, _submodules(layer.submodules.mlp)
    keys = {}
    if attention.linear_qkv is te.TELayerNormColumnParallelLinear:
        attention.linear_qkv, layer.submodules.input_layernorm = te.TEColumnParallelLinear, te.TENorm
        keys["input_layernorm."] = "self_attention.linear_qkv.layer_norm_"
    if getattr(mlp, "linear_fc1", None) is te.TELayerNormColumnParallelLinear:
        mlp.linear_fc1, layer.submodules.pre_mlp_layernorm = te.TEColumnParallelLinear, te.TENorm
        keys["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    layer.submodules.sharded_state_dict_keys_map = {**(layer.submodules.sharded_state_dict_keys_map or {}), **keys}


def _submodules(mlp: Any) -> Any:
    """Of an MLP's spec; later versions build it by a partial instead of a ModuleSpec."""
    return mlp.keywords["submodules"] if isinstance(mlp, functools.partial) else mlp.submodules


def _use_latents(layer: Any, arch: Architecture, layers: LatentLayers) -> None:
    """Puts multi-latent attention, and a norm before it, in the place of the attention of a layer."""
    layer.submodules.input_layernorm = layers.norm
    layer.submodules.self_attention = ModuleSpec(LatentSelfAttention, params={"arch": arch}, submodules=layers)


def _with_delta_nets(
    layers: Sequence[Any], arch: Architecture, config: TransformerConfig, vp_stage: int | None, classes: DeltaLayers
) -> list[Any]:
    """The layers of a stage, some of which have a delta net, and a norm before it, in the place of attention."""
    first, found = get_transformer_layer_offset(config, vp_stage=vp_stage), []
    for number, layer in enumerate(layers, first):
        if arch.has_delta_net(number):
            layer = copy.deepcopy(layer)  # noqa: PLW2901 - one spec is that of many layers
            layer.submodules.input_layernorm = classes.norm
            layer.submodules.self_attention = ModuleSpec(GatedDeltaNet, params={"arch": arch}, submodules=classes)
            _keep_apart(layer.submodules, "input_layernorm.")
        found.append(layer)
    return found


def _use_policy_router(layer: Any) -> None:
    """In a layer that has experts."""
    submodules = _submodules(layer.submodules.mlp)
    if isinstance(submodules, MoESubmodules):
        submodules.router = PolicyRouter
