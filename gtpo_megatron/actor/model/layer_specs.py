"""Modules from which Megatron builds the layers of a pipeline stage."""

import copy
import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from gtpo_megatron.actor import cpu_platform
from gtpo_megatron.actor.model.core_attention import PackedSDPA
from gtpo_megatron.actor.model.delta_net import GatedDeltaNet
from gtpo_megatron.actor.model.head_norm import AllHeadsNorm
from gtpo_megatron.actor.model.latent_attention import LatentSelfAttention
from gtpo_megatron.actor.model.layer_classes import LocalRMSNorm, layer_classes
from gtpo_megatron.actor.model.local_rotary import LocalRotaryAttention
from gtpo_megatron.actor.model.residual import ResidualAdd
from gtpo_megatron.actor.model.rotated_heads import NormedCoreAttention
from gtpo_megatron.actor.model.router import PolicyRouter
from gtpo_megatron.weights.architecture import Architecture

logger = logging.getLogger(__name__)


class _OwnOutput(RowParallelLinear):
    """An expert's projection whose output is no view, so that Megatron may add the bias in place."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, bias = super().forward(*args, **kwargs)
        return output.clone(), bias


def layer_specs(arch: Architecture, config: TransformerConfig, vp_stage: int | None, *, adapted: bool) -> Any:
    """Transformer Engine's layers if it is there; else Megatron's local ones with torch's attention.

    Args:
        arch: architecture of the model.
        config: Megatron's.
        vp_stage: virtual stage of the chunk; None if there is one.
        adapted: linear layers will have adapters, which read the layers' own inputs.
    """
    if not cpu_platform.has_transformer_engine():
        if not cpu_platform.is_cpu():
            logger.warning("Transformer Engine is not installed: layers are Megatron's own, slower and larger")
        return _local(arch, config, vp_stage)
    found = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    for layer in {id(one): one for one in found.layer_specs}.values():  # layers of a kind share one
        _use_policy_router(layer)
        if adapted:
            _unfuse_norms(layer)
        if arch.latents is not None:
            _replace_attention(layer, LatentSelfAttention, arch)
        _give_variant(layer, arch, config)
    if arch.delta is not None:
        found.layer_specs = _with_delta_nets(found.layer_specs, arch, config, vp_stage)
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
        layers = _with_delta_nets(layers, arch, config, vp_stage)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=LocalRMSNorm)


def _local_layer(arch: Architecture, config: TransformerConfig, *, num_experts: int | None) -> Any:
    spec = get_gpt_layer_local_spec(
        num_experts=num_experts, moe_grouped_gemm=False, normalization="RMSNorm", qk_layernorm=config.qk_layernorm
    )
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = LocalRMSNorm
    attention = layer.self_attention.submodules
    attention.core_attention = PackedSDPA
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = LocalRMSNorm
    if num_experts is not None:
        _use_policy_router(spec)
        _keep_apart(layer, "pre_mlp_layernorm.")
        if config.add_bias_linear:
            _submodules(_submodules(layer.mlp).experts).linear_fc2 = _OwnOutput
    if arch.latents is not None:
        _replace_attention(spec, LatentSelfAttention, arch)
    _give_variant(spec, arch, config)
    return spec


def _give_variant(spec: Any, arch: Architecture, config: TransformerConfig) -> None:
    """Norms behind attention and MLP, over all heads, of rotated ones; a factor on residuals; rotations by layer."""
    layer = spec.submodules
    if arch.norm_placement == "post":
        layer.input_layernorm = layer.pre_mlp_layernorm = IdentityOp
        if cpu_platform.has_transformer_engine():  # its linear layers have those norms within them
            linear = layer_classes().column_parallel_linear
            layer.self_attention.submodules.linear_qkv = _submodules(layer.mlp).linear_fc1 = linear
    if arch.norm_placement != "pre" or arch.residual_factor != 1.0:
        layer.self_attn_bda = layer.mlp_bda = ModuleSpec(ResidualAdd, params={"config": config, "arch": arch})
    if arch.norms_rotated_heads:
        attention = layer.self_attention.submodules
        params = {"arch": arch, "inner": attention.core_attention}
        attention.core_attention = ModuleSpec(NormedCoreAttention, params=params)
    if arch.qk_norm_spans_heads:
        attention = layer.self_attention.submodules
        for name, heads in (("q_layernorm", arch.num_heads), ("k_layernorm", arch.num_query_groups)):
            setattr(attention, name, ModuleSpec(AllHeadsNorm, params={"num_heads": heads}))
    if arch.local_rope is not None:
        layer.self_attention.module = LocalRotaryAttention
        layer.self_attention.params = {**layer.self_attention.params, "arch": arch}


def _keep_apart(layer: Any, norm: str) -> None:
    """Checkpoints name norms as Transformer Engine does, which fuses them into the layers behind, but not this one."""
    keys = layer.sharded_state_dict_keys_map or {}
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


def _with_delta_nets(
    layers: Sequence[Any], arch: Architecture, config: TransformerConfig, vp_stage: int | None
) -> list[Any]:
    """The layers of a stage, some of which have a delta net, and a norm before it, in the place of attention."""
    first, found = get_transformer_layer_offset(config, vp_stage=vp_stage), []
    for number, layer in enumerate(layers, first):
        if arch.has_delta_net(number):
            layer = copy.deepcopy(layer)  # noqa: PLW2901 - one spec is that of many layers
            _replace_attention(layer, GatedDeltaNet, arch)
        found.append(layer)
    return found


def _replace_attention(layer: Any, kind: type, arch: Architecture) -> None:
    """Puts an attention of ours, or what stands in its place, and a norm before it into a layer."""
    classes = layer_classes()
    layer.submodules.input_layernorm = classes.norm
    layer.submodules.self_attention = ModuleSpec(kind, params={"arch": arch}, submodules=classes)
    _keep_apart(layer.submodules, "input_layernorm.")


def _use_policy_router(layer: Any) -> None:
    """In a layer that has experts."""
    submodules = _submodules(layer.submodules.mlp)
    if isinstance(submodules, MoESubmodules):
        submodules.router = PolicyRouter
