"""Seconds of a step to first order: FLOPs and bytes over shares of the data sheet's rates, to put layouts in order.

A stage's time is the FLOPs of its micro-batches and the bytes that it sends meanwhile, nothing overlapped; a pipeline
adds its bubble. The trainer's products take measured shares of the peak (``efficiency.py``). Published steps take about
1.5 times as long, with experts 1.9 times: docs/planning_reference.md compares them.
"""

from dataclasses import dataclass

from gtpo_megatron.companions.planner.activations import CHUNK_TOKENS, FLOAT32_BYTES, work_of_delta_rule
from gtpo_megatron.companions.planner.adapters import adapter_parameters
from gtpo_megatron.companions.planner.efficiency import COMPUTE_EFFICIENCY, EXPERTS_EFFICIENCY, Shares, trainer_shares
from gtpo_megatron.companions.planner.engine import EngineMemory
from gtpo_megatron.companions.planner.frozen_shards import frozen_bytes
from gtpo_megatron.companions.planner.layout import Layout, layers_of_stage
from gtpo_megatron.companions.planner.request import PlanRequest
from gtpo_megatron.companions.planner.trainer_state import StageParameters, stage_parameters
from gtpo_megatron.weights.model_shape import LayerCounts

BYTES_EFFICIENCY = 0.75
"""Share of the nominal rate of a link or of a GPU's memory."""

DECODE_LAYER_S = 25e-6
"""Seconds per layer of a decode step besides reading memory: launches of a CUDA graph, two small all-reduces."""

NETWORK_MESSAGE_S = 15e-6
"""Seconds of a small message between GPUs of two nodes under NCCL, beyond what ``DECODE_LAYER_S`` has. Assumed."""

DECODE_EXPERTS_S = 25e-6
"""Seconds that a layer with experts takes besides those: routing, sorting tokens, two grouped products. Assumed."""

HOST_BYTES = 20e9
"""Bytes per second between a GPU and pinned host memory, and of a rank's share of the host's memory rate."""

DELTA_CHUNK_S = 60e-6
"""Seconds of a delta net's layer for each chunk of a sequence: ten small kernels, one after another. Assumed."""

ADAM_BYTES = 24
"""Bytes per parameter that Adam moves: float32 weight and moments, read and written once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of a step's stages.

    Attributes:
        generate: sampling; the same for every layout of the trainer.
        score: scoring by the policy, by its reference and by a teacher.
        train: all optimizer updates of the step.
        push: push into every engine, through host memory.
    """

    generate: float
    score: float
    train: float
    push: float

    @property
    def total(self) -> float:
        """Seconds of a step."""
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
    shares = shares_of(request)
    forward_alone, _, _ = _slowest_stage(request, layout, tokens, shares.score)
    forward, in_experts, products = _slowest_stage(request, layout, tokens, shares.update)
    scored, trained = (
        max(1.0, num * length / layout.data / tokens) for num in (batch.num_responses, batch.num_update_responses)
    )
    if layout.virtual > 1:  # the interleaved schedule wants a multiple of the stages
        trained = -(-trained // layout.pipeline) * layout.pipeline
    changed = adapter_parameters(request.shape, layout, 0, request.adapter) if request.adapter.is_on else widest
    bubble = layout.pipeline - 1
    again = {"full": forward, "experts": in_experts}.get(layout.recompute, 0.0)
    # frozen weights have no gradients; adapters' own products are a hundredth of theirs, and left out
    backward = 2 * forward - (products if request.adapter.is_on else 0.0)
    gathering = _gathering(request, layout)  # for a forward pass; what is made again has its layer for the backward one
    passes = forward + backward + again + 2 * gathering
    update = (trained + bubble / layout.virtual) * passes + _reduce(request, layout, changed)
    state = sum(
        elements / (replicas if layout.distributed_optimizer else 1)
        for elements, replicas in changed.replicated(layout)
    )
    # on the host Adam reads gradients there, and its state; else that leaves for the host while engines generate
    update += request.offload_fraction * state * (ADAM_BYTES + 12) / HOST_BYTES
    moved = (1 - request.offload_fraction) * state * ADAM_BYTES / HOST_BYTES if request.cluster.is_colocated else 0.0
    return StepTime(
        generate=_generate(request, engine),
        score=(request.has_scoring + request.has_reference) * (scored + bubble) * (forward_alone + gathering)
        + request.has_host_reference * _exchanges(request, widest)
        + _taught(request, layout, tokens, scored + bubble),
        train=batch.num_updates * update + moved,
        push=(widest.num_elements * request.weight_bytes + engine.arriving) / HOST_BYTES,
    )


def shares_of(request: PlanRequest) -> Shares:
    """Shares of the GPU's peak that the trainer's products outside experts reach."""
    return trainer_shares(request.shape.hidden_size, request.cluster.gpu, has_adapter=request.adapter.is_on)


def _exchanges(request: PlanRequest, widest: StageParameters) -> float:
    """Seconds in which the reference takes the policy's place, and leaves it: each time weights go both ways."""
    return 4 * widest.num_elements * request.weight_bytes / HOST_BYTES


def _taught(request: PlanRequest, layout: Layout, tokens: float, passes: float) -> float:
    """Seconds in which the teacher comes from the host and scores so many micro-batches; 0 without one."""
    if request.teacher is None:
        return 0.0
    teacher = request.of_teacher
    forward, _, _ = _slowest_stage(teacher, layout, tokens, shares_of(teacher).score)
    if not request.has_host_teacher:
        return passes * (forward + _gathering(request, layout))
    widest = max(
        stage_parameters(teacher.shape, layout, stage, teacher.vocab_multiple).num_elements
        for stage in range(layout.pipeline)
    )
    return passes * forward + widest * teacher.weight_bytes / HOST_BYTES


def _gathering(request: PlanRequest, layout: Layout) -> float:
    """Seconds in which a micro-batch's pass gathers the frozen weights that replicas share; 0: they do not.

    Ranks with the same weights are spread over the whole stage. A layer is under way while the one before it computes,
    which is not counted.
    """
    stages = [frozen_bytes(request, layout, stage) for stage in {0, layout.pipeline - 1}]
    received = max(0 if frozen is None else frozen.received for frozen in stages)
    return received / _link(request, layout.stage_ranks)


def _slowest_stage(request: PlanRequest, layout: Layout, tokens: float, share: float) -> tuple[float, float, float]:
    """Seconds of one micro-batch on the stage that all others wait for; see ``_forward``."""
    last = layout.pipeline - 1
    kinds = {(layers_of_stage(request.shape, layout, stage), stage == last) for stage in range(layout.pipeline)}
    return max(_forward(request, layout, tokens, share, *kind) for kind in kinds)


def _forward(
    request: PlanRequest, layout: Layout, tokens: float, share: float, counts: LayerCounts, has_head: bool
) -> tuple[float, float, float]:
    """Seconds of one micro-batch on a stage; of those in its experts; and in products with weights, anywhere.

    Args:
        request: batch, model and GPUs.
        layout: of the trainer.
        tokens: of the micro-batch.
        share: of the peak that products outside experts reach.
        counts: layers of the stage.
        has_head: it has the output layer too.
    """
    shape, batch = request.shape, request.batch
    length = batch.mean_prompt_tokens + batch.mean_response_tokens
    layers = sum(count for _, count in counts)
    expert_layers = sum(count for kind, count in counts if kind.has_experts)
    delta_layers = sum(count for kind, count in counts if kind.has_delta_net)
    weights = sum(count * shape.common_parameters(kind) for kind, count in counts)
    head = shape.vocab_size * shape.hidden_size * batch.mean_response_tokens / length if has_head else 0.0
    mixed = (layers - delta_layers) * length * (shape.query_width + shape.output_width) / 2
    if shape.delta is not None:
        mixed += delta_layers * 3 * shape.delta.state_size
    flops = 2 * tokens * (weights + mixed + head) / (layout.tensor * layout.context)
    row = tokens / layout.context * shape.hidden_size * request.weight_bytes
    keys_and_values = row * (shape.key_value_width + shape.value_width) / shape.hidden_size / layout.tensor
    # tensor parallelism gathers and reduces twice, but not around experts; context parallelism passes keys and values
    # around a ring
    gathered = 4 * layers - 2 * expert_layers * (shape.experts is not None and not shape.experts.shared_ffn_size)
    sent = gathered * row * _share_sent(layout.tensor) / _link(request, layout.tensor)
    sent += layers * keys_and_values * (layout.context - 1) / _link(request, layout.tensor * layout.context)
    hop = 0.0
    if layout.pipeline > 1:  # a chunk's ranks come after all of the stage before it
        reach = layout.tensor * layout.context * layout.data * 2
        hop = layout.virtual * row / layout.sequence_split / _link(request, reach)
    in_experts, expert_products = _experts(request, layout, tokens, expert_layers)
    rate = request.cluster.gpu.bf16_flops * share
    products = 2 * tokens * (weights + head) / (layout.tensor * layout.context) / rate + expert_products
    seconds = flops / rate + delta_layers * _in_delta_rule(request, layout, tokens) + in_experts + sent + hop
    return seconds, in_experts, products


def _in_delta_rule(request: PlanRequest, layout: Layout, tokens: float) -> float:
    """Seconds of a delta net beyond its products: chunk after chunk, float32 tensors written and read once."""
    if request.shape.delta is None:
        return 0.0
    chunks = (request.batch.mean_prompt_tokens + request.batch.mean_response_tokens) / CHUNK_TOKENS
    moved = 2 * FLOAT32_BYTES * work_of_delta_rule(request.shape.delta) * tokens / layout.tensor
    return chunks * DELTA_CHUNK_S + moved / (request.cluster.gpu.hbm_bytes_per_s * BYTES_EFFICIENCY)


def _experts(request: PlanRequest, layout: Layout, tokens: float, expert_layers: int) -> tuple[float, float]:
    """Seconds of a micro-batch in the experts of some layers: with the copies of tokens there and back, and without."""
    load = layout.busiest_load(request.expert_imbalance)
    chosen = _chosen_expert_parameters(request, expert_layers)
    flops = 2 * tokens * load * chosen / (layout.tensor * layout.context)
    row = tokens / layout.context * request.shape.hidden_size * request.weight_bytes
    sent = expert_layers * load * _dispatch(request, layout, row)
    products = flops / _expert_flops(request)
    return products + sent, products


def _chosen_expert_parameters(request: PlanRequest, expert_layers: int) -> int:
    """Parameters of the experts that a token is sent to, over some layers; 0 for a dense model."""
    shape = request.shape
    if shape.experts is None:
        return 0
    return expert_layers * shape.experts.experts_per_token * shape.expert_parameters


def _dispatch(request: PlanRequest, layout: Layout, row: float) -> float:
    """Seconds of one layer: copies of tokens to their experts and back, gathered by those that share an expert.

    Every rank sends equally many bytes to each other rank, so the slower link decides: the network, if the group spans
    nodes.

    Args:
        request: model and GPUs.
        layout: of the trainer.
        row: bytes of the micro-batch's hidden states, over the tensor-parallel ranks.
    """
    if request.shape.experts is None:
        return 0.0
    copies = request.shape.experts.experts_per_token * row / layout.sequence_split
    within = max(1, min(layout.expert, request.cluster.gpus_per_node // layout.expert_tensor))
    gpu = request.cluster.gpu
    seconds = max(
        copies * (within - 1) / layout.expert / gpu.nvlink_bytes_per_s,
        copies * (layout.expert - within) / layout.expert / gpu.network_bytes_per_s,
    )
    gathered = layout.expert_tensor * copies * _share_sent(layout.expert_tensor)
    return 2 * (seconds / BYTES_EFFICIENCY + gathered / _link(request, layout.expert_tensor))


def _reduce(request: PlanRequest, layout: Layout, widest: StageParameters) -> float:
    """Seconds: gradients in float32 over the replicas, new weights back to all."""
    num_bytes = 4 + request.weight_bytes
    # replicas of a parameter are spread over the whole stage
    return sum(
        elements * num_bytes * _share_sent(replicas) / _link(request, layout.stage_ranks)
        for elements, replicas in widest.replicated(layout)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeRates:
    """Seconds of an engine.

    Attributes:
        fixed: time of a decode step, however many sequences there are: weights are read, kernels launched.
        per_sequence: time that each sequence adds: its cache is read or its products are computed, the longer of both.
        prefill: time of a prompt.
        together: sequences that the engine decodes at most, by its limit and its cache.
    """

    fixed: float
    per_sequence: float
    prefill: float
    together: int


def decode_rates(request: PlanRequest, engine: EngineMemory, *, decoded: float) -> DecodeRates:
    """Rates of an engine that decodes about ``decoded`` sequences together."""
    token, read, launches = _decode(request, engine, decoded)
    context = _context(request)
    memory = request.cluster.gpu.hbm_bytes_per_s * BYTES_EFFICIENCY
    cache = engine.moved_by_step(context) / memory
    in_cache = request.engine.cache_bytes / engine.bytes_of_sequence(context)
    is_read = read / memory + decoded * cache >= decoded * token
    return DecodeRates(
        fixed=launches + (read / memory if is_read else 0.0),
        per_sequence=cache if is_read else token,
        prefill=request.batch.mean_prompt_tokens * (token + _between_nodes(request)[1]),
        together=max(1, int(min(request.engine.max_sequences, in_cache))),
    )


def _context(request: PlanRequest) -> float:
    """Tokens that a sequence has in the cache, on average over its life."""
    return request.batch.mean_prompt_tokens + request.batch.mean_response_tokens / 2


def _generate(request: PlanRequest, engine: EngineMemory) -> float:
    """A decode step reads weights and cache once; the last wave lasts as long as its longest response."""
    batch = request.batch
    responses = batch.num_responses / request.num_engines
    context = _context(request)
    in_cache = request.engine.cache_bytes / engine.bytes_of_sequence(context)
    together = max(1.0, min(responses, request.engine.max_sequences, in_cache))
    steps = max(batch.max_response_tokens, responses * batch.mean_response_tokens / together)
    decoded = responses * batch.mean_response_tokens / steps
    memory = request.cluster.gpu.hbm_bytes_per_s * BYTES_EFFICIENCY
    token, read, launches = _decode(request, engine, decoded)
    step = max((read + decoded * engine.moved_by_step(context)) / memory, decoded * token)
    prefill = responses * batch.mean_prompt_tokens * (token + _between_nodes(request)[1])
    return steps * (step + launches) + prefill


def _decode(request: PlanRequest, engine: EngineMemory, decoded: float) -> tuple[float, float, float]:
    """Seconds of a token's products, bytes of weights that a step of ``decoded`` tokens reads, seconds of launches."""
    shape, tensor, stages = request.shape, request.engine.tensor, request.engine.stages
    experts = _chosen_expert_parameters(request, shape.num_expert_layers)
    load = min(tensor, request.expert_imbalance) if request.engine.expert_parallel else 1.0
    rate = request.cluster.gpu.bf16_flops * COMPUTE_EFFICIENCY
    dense = 2 * (shape.num_active_parameters - experts) / tensor / rate
    # the stages work at the same time, each on its share of the sequences: in the time of a step for all of them
    # every stage reads its weights as often as there are stages
    token = (dense + 2 * load * experts / tensor / _expert_flops(request)) / stages
    read = stages * (engine.weights - engine.expert_weights * (1 - _share_of_experts(request, decoded / stages)))
    launches = shape.num_layers * DECODE_LAYER_S + shape.num_expert_layers * DECODE_EXPERTS_S
    messages_s, token_s = _between_nodes(request)
    return token, read, launches + messages_s + decoded * token_s


def _between_nodes(request: PlanRequest) -> tuple[float, float]:
    """Seconds of a decode step, and of each of its tokens, that an engine's network takes."""
    engine, gpu = request.engine, request.cluster.gpu
    if engine.nodes == 1:
        return 0.0, 0.0
    row = request.shape.hidden_size * engine.weight_bytes
    network = gpu.network_bytes_per_s * BYTES_EFFICIENCY
    if engine.tensor <= request.cluster.gpus_per_node:  # a stage hands on hidden states and residuals
        return engine.stages * NETWORK_MESSAGE_S, 2 * (engine.stages - 1) * row / engine.tensor / network
    # two all-reduces in every layer, each a reduction and a gathering over the nodes
    layers = 2 * request.shape.num_layers
    nodes = -(-engine.tensor // request.cluster.gpus_per_node)
    return layers * 2 * NETWORK_MESSAGE_S, layers * 2 * _share_sent(nodes) * row / network


def _share_of_experts(request: PlanRequest, tokens: float) -> float:
    """Share of a layer's experts that receive at least one of ``tokens`` tokens, if routers choose evenly."""
    experts = request.shape.experts
    return 1.0 if experts is None else 1 - (1 - experts.experts_per_token / experts.num_experts) ** tokens


def _expert_flops(request: PlanRequest) -> float:
    return request.cluster.gpu.bf16_flops * EXPERTS_EFFICIENCY


def _link(request: PlanRequest, reach: int) -> float:
    """Bytes per second within so many neighbouring ranks."""
    gpu = request.cluster.gpu
    return BYTES_EFFICIENCY * (
        gpu.nvlink_bytes_per_s if reach <= request.cluster.gpus_per_node else gpu.network_bytes_per_s
    )


def _share_sent(ranks: int) -> float:
    """Share of a buffer that each rank of a ring sends."""
    return (ranks - 1) / ranks
