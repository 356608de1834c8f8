"""Seconds of a step, estimated: to put layouts in order, not to promise anything. Every assumption is a constant here.

A stage's time is its matrix products at a fraction of the GPU's peak, plus exposed communication; a pipeline adds its
bubble; gradients are reduced after the last micro-batch. docs/planning.md compares one estimate with a published run.
"""

import math
from dataclasses import dataclass

from gtpo_megatron.planner.engine import EngineMemory
from gtpo_megatron.planner.hardware import GPU
from gtpo_megatron.planner.layout import Layout
from gtpo_megatron.planner.request import PlanRequest
from gtpo_megatron.planner.shape import ModelShape
from gtpo_megatron.planner.trainer_state import StageParameters

MATMUL_EFFICIENCY = 0.6
"""Of the peak, for matrix products of thousands of tokens in bfloat16."""

LINK_EFFICIENCY = 0.75
"""Of a link's rate, for messages of megabytes."""

MEMORY_EFFICIENCY = 0.8
"""Of the HBM's rate."""

MICRO_BATCH_FILL = 0.9
"""How full packed micro-batches are, of their budget."""

ATTENTION_EFFICIENCY = 0.4
"""Of the peak, for causal flash attention over packed sequences."""

LAUNCH_S = 60e-6
"""A layer's kernel launches and small collectives, forward, per micro-batch; backward takes twice as long."""

DECODE_LAYER_S = 25e-6
"""A layer of a decode step besides reading memory: launches out of a CUDA graph, two small all-reduces."""

HOST_LINK_BYTES = 25e9
"""A second, between a GPU and pinned host memory."""


HOST_MEMORY_BYTES = 20e9
"""A second, that the share of a node's memory bandwidth of one rank gives Adam on the host."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of a step's stages.

    Attributes:
        generate: the same for every layout of the trainer.
        train: all optimizer updates of the step.
        push: into every engine, through host memory.
    """

    generate: float
    score: float
    train: float
    push: float

    @property
    def total(self) -> float:
        """Of a step."""
        return self.generate + self.score + self.train + self.push


def step_time(request: PlanRequest, layout: Layout, widest: StageParameters, engine: EngineMemory) -> StepTime:
    """Estimates a step.

    Args:
        request: batch, model and GPUs.
        layout: of the trainer.
        widest: parameters of the largest stage.
        engine: one rank of an engine.
    """
    batch = request.batch
    mean_tokens = batch.mean_prompt_tokens + batch.mean_response_tokens
    tokens_of_micro_batch = max(MICRO_BATCH_FILL * batch.micro_batch_tokens, mean_tokens)
    forward = _forward_of_micro_batch(request, layout, tokens_of_micro_batch)
    scored = _micro_batches(batch.num_responses * mean_tokens / layout.data, tokens_of_micro_batch, 1)
    trained = _micro_batches(
        batch.num_update_responses * mean_tokens / layout.data,
        tokens_of_micro_batch,
        layout.pipeline if layout.virtual > 1 else 1,
    )
    backward = forward * (3 if layout.recompute == "full" else 2)
    bubble = layout.pipeline - 1
    update = (trained + bubble / layout.virtual) * (forward + backward)
    update += _reduce_and_step(request, layout, widest)
    # the optimizer, which left for the host while generating, comes back and leaves again; gradients are not kept
    replicas = layout.data * layout.context if layout.distributed_optimizer else 1
    moved = 2 * 12 * widest.num_elements / replicas * (1 - request.offload_fraction) / HOST_LINK_BYTES
    return StepTime(
        generate=_generate(request, engine),
        score=(scored + bubble) * forward if request.has_scoring else 0.0,
        train=batch.num_updates * update + (moved if request.cluster.is_colocated else 0.0),
        push=(widest.num_elements * request.weight_bytes + engine.weights) / HOST_LINK_BYTES,
    )


def _micro_batches(tokens: float, tokens_of_micro_batch: float, multiple: int) -> float:
    """How many a replica runs; an interleaved schedule wants a multiple of the stages."""
    count = max(1.0, tokens / tokens_of_micro_batch)
    return count if multiple == 1 else -(-count // multiple) * multiple


def _forward_of_micro_batch(request: PlanRequest, layout: Layout, tokens: float) -> float:
    """Seconds of the slowest stage, one forward pass; the last stage also has the output layer."""
    shape, gpu = request.shape, request.cluster.gpu
    layers = shape.num_layers / layout.pipeline
    shared = layout.tensor * layout.context
    active = (shape.num_active_parameters - shape.embedding_parameters) / shape.num_layers
    length = request.batch.mean_prompt_tokens + request.batch.mean_response_tokens
    matmul = 2 * active * tokens / (gpu.bf16_flops * MATMUL_EFFICIENCY)
    attention = 2 * shape.query_width * length * tokens / (gpu.bf16_flops * ATTENTION_EFFICIENCY)
    communication = _communication_of_layer(request, layout, tokens)
    seconds = layers * ((matmul + attention) / shared + communication + LAUNCH_S)
    responses = request.batch.mean_response_tokens / length
    head = 2 * shape.vocab_size * shape.hidden_size * responses * tokens / (gpu.bf16_flops * MATMUL_EFFICIENCY)
    return seconds + head / shared + _pipeline_hop(request, layout, tokens)


def _communication_of_layer(request: PlanRequest, layout: Layout, tokens: float) -> float:
    """Seconds, forward.

    Tensor parallelism gathers and reduces twice; context parallelism passes keys and values around a ring, half of it
    hidden behind attention; experts exchange tokens twice.
    """
    shape, cluster = request.shape, request.cluster
    mine = tokens / layout.context
    link = cluster.gpu.nvlink_bytes * LINK_EFFICIENCY
    tensor = 4 * mine * shape.hidden_size * request.weight_bytes * _moved(layout.tensor) / link
    outer = _link(layout.tensor * layout.context, cluster.gpu, cluster.gpus_per_node)
    keys = 2 * mine * shape.key_value_width / layout.tensor * request.weight_bytes
    context = 0.5 * keys * (layout.context - 1) / outer
    experts = 0.0
    if shape.experts is not None:
        between = _link(layout.expert, cluster.gpu, cluster.gpus_per_node)
        sent = mine / layout.sequence_split * shape.experts.experts_per_token * shape.hidden_size
        experts = 2 * sent * request.weight_bytes * _moved(layout.expert) / between
    return tensor + context + experts


def _pipeline_hop(request: PlanRequest, layout: Layout, tokens: float) -> float:
    if layout.pipeline == 1:
        return 0.0
    # the interleaved schedule sends once a chunk, half of it while it computes
    times = 1 if layout.virtual == 1 else 0.5 * layout.virtual
    sent = times * tokens / layout.context * request.shape.hidden_size * request.weight_bytes
    reach = layout.tensor * layout.context * layout.data * 2  # the next stage's ranks come after all of this stage's
    return sent / layout.sequence_split / _link(reach, request.cluster.gpu, request.cluster.gpus_per_node)


def _reduce_and_step(request: PlanRequest, layout: Layout, widest: StageParameters) -> float:
    """Gradients in float32 over the replicas, Adam on this rank's share, new weights back to all."""
    gpu, replicas = request.cluster.gpu, layout.data * layout.context
    link = _link(layout.tensor * replicas, gpu, request.cluster.gpus_per_node)
    exchanged = widest.num_elements * (4 + request.weight_bytes) * _moved(replicas) / link
    mine = widest.num_elements / (replicas if layout.distributed_optimizer else 1)
    adam = mine * (2 * 12 + 4 + request.weight_bytes) / (gpu.hbm_bytes * MEMORY_EFFICIENCY)
    on_host = mine * ((4 + 4) / HOST_LINK_BYTES + (2 * 12 + 4) / HOST_MEMORY_BYTES)
    return exchanged + adam * (1 - request.offload_fraction) + on_host * request.offload_fraction


def _moved(ranks: int) -> float:
    """Share of a buffer that a rank sends in a ring."""
    return (ranks - 1) / ranks


def _link(reach: int, gpu: GPU, gpus_per_node: int) -> float:
    """Bytes a second within so many neighbouring ranks."""
    return LINK_EFFICIENCY * (gpu.nvlink_bytes if reach <= gpus_per_node else gpu.network_bytes)


def _generate(request: PlanRequest, engine: EngineMemory) -> float:
    """Decoding reads weights and cache once a token of all sequences; the last wave lasts as long as its longest."""
    batch, gpu, shape = request.batch, request.cluster.gpu, request.shape
    responses = batch.num_responses / request.num_engines
    cached = request.engine.cache_bytes / engine.cache_per_token
    mean_context = batch.mean_prompt_tokens + batch.mean_response_tokens / 2
    together = max(1.0, min(responses, request.engine.max_sequences, cached / mean_context))
    steps = max(batch.max_response_tokens, responses * batch.mean_response_tokens / together)
    mean_batch = responses * batch.mean_response_tokens / steps
    read = _weights_read(shape, engine, mean_batch) + mean_batch * mean_context * engine.cache_per_token
    compute = 2 * shape.num_active_parameters * mean_batch / request.engine.tensor
    step = max(read / (gpu.hbm_bytes * MEMORY_EFFICIENCY), compute / (gpu.bf16_flops * MATMUL_EFFICIENCY))
    prefill_tokens = responses * batch.mean_prompt_tokens
    prefill = 2 * shape.num_active_parameters * prefill_tokens / request.engine.tensor
    return steps * (step + shape.num_layers * DECODE_LAYER_S) + prefill / (gpu.bf16_flops * MATMUL_EFFICIENCY)


def _weights_read(shape: ModelShape, engine: EngineMemory, sequences: float) -> float:
    """Bytes of weights that a decode step touches: of experts only those that some sequence is sent to."""
    if shape.experts is None:
        return engine.weights
    share = 1 - math.pow(1 - shape.experts.experts_per_token / shape.experts.num_experts, sequences)
    experts = shape.num_layers * shape.mlp_parameters / shape.num_parameters
    return engine.weights * (1 - experts * (1 - share))
