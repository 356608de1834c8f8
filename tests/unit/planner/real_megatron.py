"""Real Megatron models in a world of ranks that are not there: one process plays any rank of a fake process group.

Parameters, Megatron's data-parallel buffers and its optimizer are made on the meta device, so that a rank of a 32 B
model costs a tenth of a second and no memory. Meant for a forked process: it changes what Megatron is told of devices.
"""

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from gtpo_megatron.planner.layout import Layout
from gtpo_megatron.planner.shape import ModelShape

DTYPES = {2: torch.bfloat16, 4: torch.float32}


@dataclass(frozen=True)
class RankBytes:
    """What the tensors of one rank take."""

    weights: int
    gradients: int
    optimizer: int


def world_of(layout: Layout, rank: int) -> Any:
    """Joins a world of ``layout.num_ranks`` as ``rank``; nobody else is there, and every collective returns at once."""
    from gtpo_megatron.actor import cpu_platform

    cpu_platform.install()
    return _world(layout, rank)


@contextlib.contextmanager
def _world(layout, rank):
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.num_ranks)
    try:
        parallel_state.initialize_model_parallel(
            layout.tensor,
            layout.pipeline,
            layout.virtual if layout.virtual > 1 else None,
            context_parallel_size=layout.context,
            expert_model_parallel_size=layout.expert,
            expert_tensor_parallel_size=1,
            create_gloo_process_groups=False,  # a fake world has none
        )
        model_parallel_cuda_manual_seed(1, force_reset_rng=True)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def build_chunks(shape: ModelShape, layout: Layout, *, weight_bytes: int, vocab_multiple: int, **settings: Any) -> Any:
    """This rank's chunks of the model as ``actor/model.py`` makes them, and their configuration."""
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_config import TransformerConfig

    dtype = DTYPES[weight_bytes]
    experts = shape.experts
    if experts is not None:
        settings |= {
            "num_moe_experts": experts.num_experts,
            "moe_router_topk": experts.experts_per_token,
            "moe_ffn_hidden_size": experts.ffn_size,
            "moe_router_load_balancing_type": "none",
            "expert_model_parallel_size": layout.expert,
            "expert_tensor_parallel_size": 1,
            # the other dispatcher makes CUDA streams; neither has parameters
            "moe_token_dispatcher_type": "allgather",
        }
    config = TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_query_groups,
        kv_channels=shape.head_size,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual if layout.virtual > 1 else None,
        # of this the local layers know nothing, and it changes neither parameters nor buffers
        context_parallel_size=1,
        sequence_parallel=layout.sequence_parallel,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=weight_bytes == 2,
        use_cpu_initialization=False,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **settings,
    )
    unit = layout.tensor * vocab_multiple
    chunks = []
    for chunk in range(layout.virtual):
        place = {"ignore_virtual": False, "vp_stage": chunk} if layout.virtual > 1 else {}
        model = _policy(config, shape, -(-shape.vocab_size // unit) * unit, place, chunk, parallel_state)
        chunks.append(model.to(dtype=dtype))
    return chunks, config


def _policy(config, shape, padded_vocab, place, chunk, parallel_state):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

    from gtpo_megatron.actor.core_attention import PackedSDPA
    from gtpo_megatron.actor.model import PolicyModel, _RMSNorm

    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, normalization="RMSNorm", qk_layernorm=config.qk_layernorm
    )
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = _RMSNorm
    attention = layer.self_attention.submodules
    attention.core_attention = PackedSDPA
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = _RMSNorm
    vp_stage = chunk if place else None
    layers = [spec] * get_num_layers_to_build(config, vp_stage=vp_stage)
    return PolicyModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(layer_specs=layers, layer_norm=_RMSNorm),
        vocab_size=padded_vocab,
        max_sequence_length=shape.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(**place),
        post_process=parallel_state.is_pipeline_last_stage(**place),
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tied_embeddings,
        position_embedding_type="rope",
        vp_stage=vp_stage,
    )


def rank_bytes(shape: ModelShape, layout: Layout, rank: int, *, weight_bytes: int, vocab_multiple: int) -> RankBytes:
    """Weights, gradient buffers and Adam's state of one rank, by Megatron's own classes."""
    from gtpo_megatron.actor import cpu_platform

    cpu_platform.install()
    _pretend_that_meta_is_the_gpu()
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    with _world(layout, rank), torch.device("meta"):
        chunks, config = build_chunks(shape, layout, weight_bytes=weight_bytes, vocab_multiple=vocab_multiple)
        ddp_config = DistributedDataParallelConfig(
            use_distributed_optimizer=layout.distributed_optimizer, grad_reduce_in_fp32=True
        )
        models = [DistributedDataParallel(config, ddp_config, chunk) for chunk in chunks]
        optimizer = _optimizer(models, layout, DTYPES[weight_bytes])
        buffers = [buffer for model in models for buffer in (*model.buffers, *model.expert_parallel_buffers)]
        if layout.distributed_optimizer:
            weights = sum(_size(buffer.param_data) for buffer in buffers)
        else:
            weights = sum(_size(parameter) for model in models for parameter in model.parameters())
        return RankBytes(
            weights=weights,
            gradients=sum(_size(buffer.grad_data) for buffer in buffers),
            optimizer=_adam_bytes(optimizer, is_copy=weight_bytes == 2),
        )


def _optimizer(models, layout, dtype):
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(
        optimizer="adam",
        lr=1e-6,
        weight_decay=0.1,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=layout.distributed_optimizer,
    )
    return get_megatron_optimizer(config, models, use_gloo_process_groups=False)


def _adam_bytes(optimizer, *, is_copy):
    """Runs one step of the inner Adam, so that its moments are there; master weights count where they are copies."""
    total = 0
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.optimizer is None:
            continue
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.empty_like(parameter)
        part.optimizer.step()
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                state = part.optimizer.state[parameter]
                total += sum(_size(state[name]) for name in ("exp_avg", "exp_avg_sq"))
                total += _size(parameter) if is_copy else 0
    return total


def _size(tensor):
    return tensor.numel() * tensor.element_size()


def _pretend_that_meta_is_the_gpu():
    from gtpo_megatron.actor import cpu_platform

    torch.cuda.current_device = lambda: torch.device("meta")
    cpu_platform.device = lambda: torch.device("meta")
    names = {torch.float32: "torch.cuda.FloatTensor", torch.bfloat16: "torch.cuda.BFloat16Tensor"}
    original = torch.Tensor.type

    def type_(self, dtype=None, *args, **kwargs):
        if dtype is None and self.is_meta:
            return names[self.dtype]
        return original(self) if dtype is None else original(self, dtype, *args, **kwargs)

    torch.Tensor.type = type_


def saved_bytes(shape: ModelShape, layout: Layout, *, weight_bytes: int, tokens: int) -> int:
    """Bytes that autograd keeps of a forward pass of a real model on the CPU: every storage once, weights left out."""
    settings = {}
    if layout.recompute == "full":
        settings = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif layout.recompute == "selective":
        settings = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    with world_of(layout, 0):
        from megatron.core.packed_seq_params import PackedSeqParams

        chunks, _ = build_chunks(shape, layout, weight_bytes=weight_bytes, vocab_multiple=1, **settings)
        model = chunks[0].train()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        kept = {}  # storages stay alive until they are counted, so that no two have one address

        def keep(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = storage
            return tensor

        cu_seqlens = torch.tensor([0, tokens // 4, tokens], dtype=torch.int32)
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=3 * tokens // 4,
            max_seqlen_kv=3 * tokens // 4,
        )
        ids, positions = torch.zeros(1, tokens, dtype=torch.int64), torch.arange(tokens)[None]
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(ids, positions, None, packed_seq_params=packed)
        return sum(storage.nbytes() for storage in kept.values())
