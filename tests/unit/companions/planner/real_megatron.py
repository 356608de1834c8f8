"""Real Megatron models in a world of ranks that are not there: one process plays any rank of a fake process group.

Parameters, Megatron's data-parallel buffers and its optimizer are made on the meta device, so that a rank of a 32 B
model costs a tenth of a second and no memory. Meant for a forked process: it changes what Megatron is told of devices.
"""

import contextlib
import functools
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from gtpo_megatron.companions.planner.layout import Layout
from gtpo_megatron.config.adapter import AdapterConfig
from gtpo_megatron.config.model import ModelConfig
from gtpo_megatron.config.optimizer import OptimizerConfig
from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.weights.architecture import Architecture
from gtpo_megatron.weights.model_shape import ModelShape

NO_ADAPTER = AdapterConfig()
DTYPES = {2: torch.bfloat16, 4: torch.float32}


@dataclass(frozen=True)
class RankBytes:
    """What the tensors of one rank take."""

    weights: int
    gradients: int
    optimizer: int
    routers: int


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
            expert_tensor_parallel_size=layout.expert_tensor,
            create_gloo_process_groups=False,  # a fake world has none
        )
        model_parallel_cuda_manual_seed(1, force_reset_rng=True)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def build_chunks(shape: ModelShape, layout: Layout, *, weight_bytes: int, vocab_multiple: int, is_real: bool) -> Any:
    """This rank's chunks of the model, and their configuration, by the actor's own code.

    Args:
        shape: of the model.
        layout: of the ranks.
        weight_bytes: of an element.
        vocab_multiple: of the padded vocabulary, times the tensor-parallel ranks.
        is_real: with values, on the CPU; else for the meta device.
    """
    from gtpo_megatron.actor.model import policy_model
    from gtpo_megatron.actor.model.transformer_config import transformer_config

    dtype = "bfloat16" if weight_bytes == 2 else "float32"
    model = ModelConfig(path="unused", dtype=dtype, recompute=layout.recompute)
    parallel = _parallel(layout)
    arch = _architecture(shape)
    config = transformer_config(arch, model, parallel)
    settings: dict[str, Any] = {}
    if not is_real:
        settings |= {"use_cpu_initialization": False, "perform_initialization": False}
    for name, value in settings.items():
        setattr(config, name, value)
    # a GPU pads the vocabulary to more than a CPU does
    padded = arch.padded_vocab_size(layout.tensor, vocab_multiple)
    with mock.patch.object(policy_model, "padded_vocab_size", return_value=padded):
        chunks = policy_model.build_chunks(arch, model, parallel, config)
    policy_model.mark_experts(chunks)
    return chunks, config


def _parallel(layout):
    return ParallelConfig(
        num_ranks=layout.num_ranks,
        tensor_parallel_size=layout.tensor,
        pipeline_parallel_size=layout.pipeline,
        virtual_pipeline_size=layout.virtual,
        last_stage_layers=layout.last_layers,
        context_parallel_size=layout.context,
        sequence_parallel=layout.sequence_parallel,
        distributed_optimizer=layout.distributed_optimizer,
        expert_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
    )


def _architecture(shape):
    family = "qwen3_moe" if shape.experts is not None else "qwen2"
    if shape.delta is not None:
        family = "qwen3_next"
    return Architecture(
        family=family if shape.latents is None else "deepseek",
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_size=shape.ffn_size,
        num_heads=shape.num_heads,
        num_query_groups=shape.num_query_groups,
        head_size=shape.head_size,
        vocab_size=shape.vocab_size,
        max_positions=shape.max_positions,
        norm_eps=1e-6,
        rope_theta=1e6,
        tied_embeddings=shape.tied_embeddings,
        qkv_bias=shape.qkv_bias,
        has_sinks=shape.has_sinks,
        norm_placement=shape.norm_placement,
        qk_norm=shape.qk_norm,
        qk_norm_spans_heads=shape.qk_norm_spans_heads,
        has_output_gate=shape.has_output_gate,
        delta=shape.delta,
        norms_from_one=shape.delta is not None,
        rotary_fraction=1.0 if shape.latents is None else shape.latents.rotated_size / shape.head_size,
        latents=shape.latents,
        experts=shape.experts,
    )


def join_adapters(chunks: Any, shape: ModelShape, layout: Layout, rank: int, adapter: AdapterConfig) -> None:
    """By the actor's own code; the adapters are 0."""
    from gtpo_megatron.actor.model import adapters

    def whole(projection):
        return torch.zeros(adapter.rank, projection.columns), torch.zeros(projection.rows, adapter.rank)

    adapters.join_adapters(chunks, _architecture(shape), adapter, _parallel(layout), global_rank=rank, whole=whole)


def rank_bytes(
    shape: ModelShape,
    layout: Layout,
    rank: int,
    *,
    weight_bytes: int,
    vocab_multiple: int,
    adapter: AdapterConfig = NO_ADAPTER,
) -> RankBytes:
    """Weights, gradient buffers and Adam's state of one rank, by Megatron's own classes."""
    from gtpo_megatron.actor import cpu_platform

    cpu_platform.install()
    _pretend_that_meta_is_the_gpu()
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    with _world(layout, rank), torch.device("meta"):
        chunks, config = build_chunks(
            shape, layout, weight_bytes=weight_bytes, vocab_multiple=vocab_multiple, is_real=False
        )
        if adapter.is_on:
            join_adapters(chunks, shape, layout, rank, adapter)
        is_copy = weight_bytes == 2 and adapter.dtype == "model"
        ddp_config = DistributedDataParallelConfig(
            use_distributed_optimizer=layout.distributed_optimizer, grad_reduce_in_fp32=True
        )
        models = [DistributedDataParallel(config, ddp_config, chunk) for chunk in chunks]
        optimizer = _optimizer(models, layout, DTYPES[weight_bytes])
        buffers = [buffer for model in models for buffer in (*model.buffers, *model.expert_parallel_buffers)]
        if layout.distributed_optimizer:
            frozen = (one for model in models for one in model.parameters() if not one.requires_grad)
            weights = sum(_size(buffer.param_data) for buffer in buffers) + sum(map(_size, frozen))
        else:
            weights = sum(_size(parameter) for model in models for parameter in model.parameters())
        return RankBytes(
            weights=weights,
            gradients=sum(_size(buffer.grad_data) for buffer in buffers),
            optimizer=_adam_bytes(optimizer, is_copy=is_copy),
            routers=_router_bytes(chunks),
        )


def _router_bytes(chunks):
    """Buffers of all modules, and the tensors that routers and dispatchers hold otherwise; every storage once."""
    tensors = [buffer for chunk in chunks for buffer in chunk.buffers()]
    for module in (module for chunk in chunks for module in chunk.modules()):
        for owner in (module, getattr(module, "token_dispatcher", None)):
            if hasattr(owner, "tokens_per_expert") or hasattr(owner, "sort_input_by_local_experts"):
                tensors += [value for value in vars(owner).values() if isinstance(value, torch.Tensor)]
    return sum({tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def _optimizer(models, layout, dtype):
    from gtpo_megatron.actor import optimizer

    config = OptimizerConfig(learning_rate=1e-6, weight_decay=0.1)
    # a fake world has no gloo groups
    real = functools.partial(optimizer.get_megatron_optimizer, use_gloo_process_groups=False)
    with mock.patch.object(optimizer, "get_megatron_optimizer", real):
        return optimizer.build_optimizer(config, models, dtype=dtype, distributed=layout.distributed_optimizer)


def _adam_bytes(optimizer, *, is_copy):
    """Runs one step of the inner Adam, so that its moments are there; master weights count where they are copies."""
    total = 0
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.optimizer is None:
            continue
        for group in part.optimizer.param_groups:
            group["fused"] = False  # on the meta device there is no such kernel
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


@functools.cache
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
    with world_of(layout, 0):
        from megatron.core.packed_seq_params import PackedSeqParams

        from gtpo_megatron.actor.model.core_attention import PREFIXES

        chunks, _ = build_chunks(shape, layout, weight_bytes=weight_bytes, vocab_multiple=1, is_real=True)
        model = chunks[0].train()
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, 0.01)  # some have no values before weights are loaded
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
        setattr(packed, PREFIXES, ((), ()))
        ids, positions = torch.zeros(1, tokens, dtype=torch.int64), torch.arange(tokens)[None]
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(ids, positions, None, packed_seq_params=packed)
        return sum(storage.nbytes() for storage in kept.values())
