"""Seconds of a step to first order: FLOPs and bytes over the rates of the data sheet, to put layouts in order.

A stage's time is the FLOPs of its micro-batches and the bytes that it sends meanwhile, nothing overlapped; a pipeline
adds its bubble. Published steps take about 1.7 times as long: docs/planning.md compares two.
"""

from dataclasses import dataclass

from gtpo_megatron.planner.engine import EngineMemory
from gtpo_megatron.planner.layout import Layout
from gtpo_megatron.planner.request import PlanRequest
from gtpo_megatron.planner.trainer_state import StageParameters

COMPUTE_EFFICIENCY = 0.6
"""Of the bfloat16 peak, for products of thousands of tokens."""

BYTES_EFFICIENCY = 0.75
"""Of the rate of a link or of a GPU's memory."""

DECODE_LAYER_S = 25e-6
"""Per layer of a decode step besides reading memory: launches out of a CUDA graph, two small all-reduces."""

HOST_BYTES = 20e9
"""Per second, between a GPU and pinned host memory, and of a rank's share of the host's memory."""

ADAM_BYTES = 24
"""Per parameter: float32 weight and moments, read and written once."""


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
    length = batch.mean_prompt_tokens + batch.mean_response_tokens
    tokens = max(batch.micro_batch_tokens, length)
    forward = _forward(request, layout, tokens)
    scored, trained = (
        max(1.0, num * length / layout.data / tokens) for num in (batch.num_responses, batch.num_update_responses)
    )
    if layout.virtual > 1:  # the interleaved schedule wants a multiple of the stages
        trained = -(-trained // layout.pipeline) * layout.pipeline
    bubble = layout.pipeline - 1
    passes = 4 if layout.recompute == "full" else 3
    update = (trained + bubble / layout.virtual) * passes * forward + _reduce(request, layout, widest)
    state = widest.num_elements / (layout.data * layout.context if layout.distributed_optimizer else 1)
    # on the host Adam reads gradients there, and its state; else that leaves for the host while engines generate
    update += request.offload_fraction * state * (ADAM_BYTES + 12) / HOST_BYTES
    moved = (1 - request.offload_fraction) * state * ADAM_BYTES / HOST_BYTES if request.cluster.is_colocated else 0.0
    return StepTime(
        generate=_generate(request, engine),
        score=(scored + bubble) * forward if request.has_scoring else 0.0,
        train=batch.num_updates * update + moved,
        push=(widest.num_elements * request.weight_bytes + engine.weights) / HOST_BYTES,
    )


def _forward(request: PlanRequest, layout: Layout, tokens: float) -> float:
    """Seconds of one micro-batch on the slowest stage, which also has the output layer."""
    shape, batch = request.shape, request.batch
    length = batch.mean_prompt_tokens + batch.mean_response_tokens
    layers = shape.num_layers / layout.pipeline
    weights = (shape.num_active_parameters - shape.embedding_parameters) / layout.pipeline
    head = shape.vocab_size * shape.hidden_size * batch.mean_response_tokens / length
    flops = 2 * tokens * (weights + layers * shape.query_width * length + head) / (layout.tensor * layout.context)
    row = tokens / layout.context * shape.hidden_size * request.weight_bytes
    keys_and_values = 2 * row * shape.key_value_width / shape.hidden_size / layout.tensor
    # tensor parallelism gathers and reduces twice, context parallelism passes keys and values around a ring
    sent = 4 * row * _share_sent(layout.tensor) / _link(request, layout.tensor)
    sent += keys_and_values * (layout.context - 1) / _link(request, layout.tensor * layout.context)
    if shape.experts is not None:  # there and back
        copies = 2 * shape.experts.experts_per_token / layout.sequence_split
        sent += copies * row * _share_sent(layout.expert) / _link(request, layout.expert)
    hop = 0.0
    if layout.pipeline > 1:  # a chunk's ranks come after all of the stage before it
        reach = layout.tensor * layout.context * layout.data * 2
        hop = layout.virtual * row / layout.sequence_split / _link(request, reach)
    return flops / _flops(request) + layers * sent + hop


def _reduce(request: PlanRequest, layout: Layout, widest: StageParameters) -> float:
    """Seconds: gradients in float32 over the replicas, new weights back to all."""
    replicas = layout.data * layout.context
    num_bytes = widest.num_elements * (4 + request.weight_bytes)
    return num_bytes * _share_sent(replicas) / _link(request, layout.tensor * replicas)


def _generate(request: PlanRequest, engine: EngineMemory) -> float:
    """A decode step reads weights and cache once; the last wave lasts as long as its longest response."""
    batch, tensor = request.batch, request.engine.tensor
    responses = batch.num_responses / request.num_engines
    context = batch.mean_prompt_tokens + batch.mean_response_tokens / 2
    in_cache = request.engine.cache_bytes / engine.cache_per_token / context
    together = max(1.0, min(responses, request.engine.max_sequences, in_cache))
    steps = max(batch.max_response_tokens, responses * batch.mean_response_tokens / together)
    decoded = responses * batch.mean_response_tokens / steps
    memory = request.cluster.gpu.hbm_bytes * BYTES_EFFICIENCY
    token = 2 * request.shape.num_active_parameters / tensor / _flops(request)
    step = max((engine.weights + decoded * context * engine.cache_per_token) / memory, decoded * token)
    prefill = responses * batch.mean_prompt_tokens * token
    return steps * (step + request.shape.num_layers * DECODE_LAYER_S) + prefill


def _flops(request: PlanRequest) -> float:
    return request.cluster.gpu.bf16_flops * COMPUTE_EFFICIENCY


def _link(request: PlanRequest, reach: int) -> float:
    """Bytes per second within so many neighbouring ranks."""
    gpu = request.cluster.gpu
    return BYTES_EFFICIENCY * (gpu.nvlink_bytes if reach <= request.cluster.gpus_per_node else gpu.network_bytes)


def _share_sent(ranks: int) -> float:
    """Of a buffer, by each rank of a ring."""
    return (ranks - 1) / ranks
