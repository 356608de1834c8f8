"""Bytes by part, per rank of a stage, in every phase of a step.

Colocated, a step goes as ``orchestration/stages/stages.py`` says: generate (engine awake, the trainer's gradients
freed and its optimizer in pinned host memory), score and train (engine asleep, gradients and optimizer back), push (as
generate, but the engine's cache is not there), save (engine asleep, its weights on the host).
Disaggregated, a rollout GPU knows generate and push, a trainer GPU score, train, push and save. If vLLM computes the
entropies, there is no scoring but that of a reference policy, whose weights are in pinned host memory all the time and
change places with the trainer's for it, and that of a teacher, whose weights come from there and are dropped again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from gtpo_megatron.companions.planner import hardware
from gtpo_megatron.companions.planner.activations import (
    FLOAT32_BYTES,
    in_flight,
    layer_bytes_per_token,
    saved_by_final_norm,
    saved_by_layer,
    work_of_delta_rule,
)
from gtpo_megatron.companions.planner.adapters import adapted_state, adapter_parameters, saved_by_adapters
from gtpo_megatron.companions.planner.engine import EngineMemory, engine_memory
from gtpo_megatron.companions.planner.frozen_shards import frozen_bytes
from gtpo_megatron.companions.planner.layout import Layout, Recompute, layers_of_chunk
from gtpo_megatron.companions.planner.output_layer import (
    CPU_TILE_ELEMENTS,
    GPU_TILE_ELEMENTS,
    KEPT_BYTES,
    OutputLayerMemory,
    output_layer,
)
from gtpo_megatron.companions.planner.push_connections import connection_bytes, rank_connections, worker_connections
from gtpo_megatron.companions.planner.request import PlanRequest
from gtpo_megatron.companions.planner.trainer_state import (
    StageParameters,
    TrainerState,
    stage_parameters,
    trainer_state,
)
from gtpo_megatron.weights.model_shape import LayerCounts, LayerKind

Phase = Literal["generate", "score", "train", "push", "save"]
PHASES: tuple[Phase, ...] = ("generate", "score", "train", "push", "save")

Part = Literal[
    "weights",
    "gathered weights",
    "gradients",
    "optimizer",
    "activations",
    "output layer",
    "workspace",
    "teacher",
    "vLLM weights",
    "KV cache",
    "vLLM workspace",
    "push buffers",
    "checkpoint staging",
    "reserve",
]
PARTS: tuple[Part, ...] = Part.__args__  # type: ignore[attr-defined]
"""In the order of the table."""

Bytes: TypeAlias = dict[Part, int]

_TRANSIENT = frozenset[Part](
    {"gathered weights", "activations", "output layer", "workspace", "vLLM workspace", "push buffers"}
)
"""Parts that come and go within a step, and so fragment what the allocator holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GPUMemory:
    """One kind of GPU in a plan.

    Attributes:
        role: ``stage 3`` or ``engine``.
        phases: bytes by part, in the phases it knows.
        host: bytes of host memory that its processes take, by purpose.
    """

    role: str
    phases: Mapping[Phase, Bytes]
    host: Mapping[str, int]

    @property
    def peak_phase(self) -> Phase:
        """The phase with the most bytes."""
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))

    @property
    def peak(self) -> int:
        """Bytes in that phase."""
        return sum(self.phases[self.peak_phase].values())


def trainer_gpu(request: PlanRequest, layout: Layout, stage: int) -> GPUMemory:
    """A rank of a pipeline stage; with its share of an engine if the two are colocated."""
    parameters = stage_parameters(request.shape, layout, stage, request.vocab_multiple)
    trained, state = _trained(request, layout, stage, parameters)
    head = _head(request, layout) if stage == layout.pipeline - 1 else OutputLayerMemory()
    score, train = _forward_and_backward(request, layout, stage, trained, head)
    if request.has_host_reference:
        score["workspace"] = max(score["workspace"], hardware.EXCHANGE_BYTES)
    weights = state.weights + state.routers
    held: Bytes = {"weights": weights, "gradients": state.gradients, "optimizer": state.optimizer}
    push = _pushing(request, layout, stage, parameters)
    phases: dict[Phase, Bytes] = {
        "train": {**held, **train},
        "push": {"weights": weights, **push} if request.cluster.is_colocated else {**held, **push},
        "save": {**held, "checkpoint staging": _staging_on_gpu(trained, layout)},
    }
    if request.has_scoring or request.has_reference or request.teacher is not None:
        phases = {"score": {**held, **score, **_taught(request, layout, stage, score)}, **phases}
    host = _host_of_rank(trained, layout, request.adapter_bytes, state)
    if request.has_host_reference:
        host["reference policy"] = parameters.num_elements * request.weight_bytes
        if request.resets_reference:
            host["checkpoint staging"] += host["reference policy"]
    if request.has_host_teacher:
        host["teacher"] = phases["score"]["teacher"]
    reserve = hardware.DRIVER_BYTES + _trainer_reserve(layout) + connection_bytes(rank_connections(request, layout))
    if request.cluster.is_colocated:
        # the last push is checked by responses that are scored while the engine stays awake
        phases = {"generate": {"weights": weights, **score}, **phases}
        _add_engine(phases, request)
        reserve += _engine_reserve(request)
        host["optimizer while generating"] = state.optimizer
        host["vLLM weights while saving"] = engine_of(request).weights
        for name, size in _host_of_worker(request).items():
            host[name] = host.get(name, 0) + size
    for parts in phases.values():
        _add_buckets(parts, request, sides=2 if request.cluster.is_colocated else 1)
        asleep = request.cluster.is_colocated and "vLLM weights" not in parts
        parts["reserve"] = reserve + _fragmentation(parts) + hardware.ENGINE_ASLEEP_BYTES * asleep
    _correct(phases, request)
    return GPUMemory(role=f"stage {stage}", phases=phases, host=host)


def _pushing(request: PlanRequest, layout: Layout, stage: int, parameters: StageParameters) -> Bytes:
    """What a push takes on a rank, besides the buckets.

    A slice that is not contiguous is copied on the GPU before it goes into a bucket; with adapters a weight is merged
    in float32, from projections that are joined.
    """
    copied = parameters.largest * (2 * FLOAT32_BYTES if request.adapter.is_on else request.weight_bytes)
    frozen = frozen_bytes(request, layout, stage)
    if frozen is None or request.adapter.pushes_alone:
        return {"push buffers": copied}
    return {"gathered weights": frozen.pushed, "push buffers": copied}


def _taught(request: PlanRequest, layout: Layout, stage: int, score: Bytes) -> Bytes:
    """What scoring by the teacher changes of the bytes of scoring: its weights, and its pass where that takes more."""
    if not request.has_host_teacher:
        return {}
    teacher = request.of_teacher
    parameters = stage_parameters(teacher.shape, layout, stage, teacher.vocab_multiple)
    own, _ = _forward_and_backward(teacher, layout, stage, parameters, _head(teacher, layout))
    taken: Bytes = {part: max(size, own.get(part, 0)) for part, size in score.items()}
    return taken | {"teacher": parameters.num_elements * teacher.weight_bytes}


def _trained(
    request: PlanRequest, layout: Layout, stage: int, parameters: StageParameters
) -> tuple[StageParameters, TrainerState]:
    """The parameters of a stage that are trained, and the bytes of all of them."""
    if not request.adapter.is_on:
        state = trainer_state(
            parameters, layout, weight_bytes=request.weight_bytes, offload_fraction=request.offload_fraction
        )
        return parameters, state
    adapters = adapter_parameters(request.shape, layout, stage, request.adapter)
    state = adapted_state(
        parameters, adapters, layout, weight_bytes=request.weight_bytes, adapter_bytes=request.adapter_bytes
    )
    if (frozen := frozen_bytes(request, layout, stage)) is not None:
        whole = parameters.num_elements * request.weight_bytes
        state = replace(state, weights=state.weights - whole + frozen.kept)
    return adapters, state


def engine_gpu(request: PlanRequest, layout: Layout) -> GPUMemory:
    """A GPU that only generates, beside a trainer of this layout."""
    phases: dict[Phase, Bytes] = {"generate": {}, "push": {}}
    _add_engine(phases, request)
    for parts in phases.values():
        _add_buckets(parts, request, sides=1)
        connections = connection_bytes(worker_connections(request, layout))
        parts["reserve"] = hardware.DRIVER_BYTES + _engine_reserve(request) + connections + _fragmentation(parts)
    _correct(phases, request)
    return GPUMemory(role="engine", phases=phases, host=_host_of_worker(request))


def node_host(request: PlanRequest, rank: GPUMemory) -> dict[str, int]:
    """Bytes of host memory of the fullest node, by purpose.

    Ranks fill the nodes first: that is a node full of ranks, the last one with ranks and the first engines beside them,
    or a node full of engines.

    Args:
        request: GPUs of a node, and how many of them train and generate.
        rank: of the trainer, with its share of an engine if the two are colocated.
    """
    cluster = request.cluster
    full_nodes, last = divmod(cluster.num_trainer_gpus, cluster.gpus_per_node)
    mixtures = [(last, min(cluster.gpus_per_node - last, cluster.num_rollout_gpus))]
    if full_nodes:
        mixtures += [(cluster.gpus_per_node, 0), (0, min(cluster.gpus_per_node, cluster.num_rollout_gpus))]
    engine = {} if cluster.is_colocated else _host_of_worker(request)
    nodes = []
    for num_ranks, num_engines in mixtures:
        parts = {name: num_ranks * size for name, size in rank.host.items() if num_ranks}
        for name, size in engine.items():
            parts[name] = parts.get(name, 0) + num_engines * size
        nodes.append(parts)
    fullest = max(nodes, key=lambda parts: sum(parts.values()))
    return fullest | ({"object store": request.object_store_bytes} if request.object_store_bytes else {})


def engine_of(request: PlanRequest) -> EngineMemory:
    """Memory per rank of the request's engine."""
    return engine_memory(
        request.shape,
        tensor=request.engine.tensor,
        stages=request.engine.stages,
        weight_bytes=request.engine.weight_bytes,
        layer_bytes=request.engine.layer_bytes,
        max_sequences=request.engine.max_sequences,
        sequence_tokens=request.batch.max_sequence_tokens,
        expert_parallel=request.engine.expert_parallel,
    )


def longest_sequence_bytes(request: PlanRequest) -> int:
    """Bytes that a sequence of full length has in an engine's cache, on each of its GPUs."""
    return engine_of(request).bytes_in_blocks(request.batch.max_sequence_tokens)


def _add_engine(phases: dict[Phase, Bytes], request: PlanRequest) -> None:
    """The engine's parts: all of it while generating, weights and what a push needs in the push."""
    engine = engine_of(request)
    phases["generate"]["vLLM weights"] = engine.weights
    phases["generate"]["KV cache"] = request.engine.cache_bytes
    phases["generate"]["vLLM workspace"] = engine.workspace
    phases["push"]["vLLM weights"] = engine.weights
    # buckets are unpacked into tensors of full shape, as vLLM's loader wants them, all experts of a layer at once; and
    # a layer is there twice
    vocabulary = request.shape.vocab_size * request.shape.hidden_size * request.engine.weight_bytes
    unpacked = max(vocabulary, engine.layer_experts, request.engine.tensor * request.bucket_bytes)
    phases["push"]["push buffers"] = phases["push"].get("push buffers", 0) + unpacked + engine.layer


def _add_buckets(parts: Bytes, request: PlanRequest, *, sides: int) -> None:
    """Buckets of the push that are on the GPU stay there between pushes."""
    if request.push_bytes_on_gpu:
        parts["push buffers"] = parts.get("push buffers", 0) + sides * request.push_bytes_on_gpu


def _correct(phases: dict[Phase, Bytes], request: PlanRequest) -> None:
    """Adds to the reserve what a preflight has found beyond the plan, or takes away what it has not found."""
    for phase, parts in phases.items():
        parts["reserve"] += request.correction.get(phase, 0)


def _head(request: PlanRequest, layout: Layout) -> OutputLayerMemory:
    unit = layout.tensor * request.vocab_multiple
    return output_layer(
        tokens=-(-request.batch.largest_micro_batch // layout.context),
        hidden_size=request.shape.hidden_size,
        vocab_rows=-(-request.shape.vocab_size // unit) * request.vocab_multiple,
        chunk_tokens=request.batch.head_chunk_tokens,
        weight_bytes=request.weight_bytes,
        gathers=layout.sequence_parallel,
        tile_elements=CPU_TILE_ELEMENTS if request.kernels == "torch" else GPU_TILE_ELEMENTS,
        kept_bytes=KEPT_BYTES if request.kernels == "torch" else 0,
    )


def _forward_and_backward(
    request: PlanRequest, layout: Layout, stage: int, trained: StageParameters, head: OutputLayerMemory
) -> tuple[Bytes, Bytes]:
    """Temporary memory while scoring, and while training.

    Work within a layer: its activations without the sharding of sequence parallelism, and the gradients of the widest
    ones. The output layer and the last layer's backward pass are not at work at once.
    """
    shape, batch = request.shape, request.batch
    tokens = -(-batch.largest_micro_batch // layout.context)
    per_replica = -(-batch.num_update_responses // layout.data) * batch.max_sequence_tokens
    num_micro_batches = max(1, -(-per_replica // batch.largest_micro_batch))
    chunks = in_flight(layout, stage, num_micro_batches)
    layers = _chunks(request, layout, stage)
    kinds = {kind for counts in layers for kind, _ in counts}
    kept = {kind: _kept_by_layer(request, layout, kind, layout.recompute) for kind in kinds}
    # of chunks with different layers, as many of the one that keeps most
    activations = chunks * tokens * max(sum(count * kept[kind] for kind, count in counts) for counts in layers)
    if stage == layout.pipeline - 1:
        final = saved_by_final_norm(shape, request.weight_bytes)
        activations += layer_bytes_per_token(layout, final) * tokens
    width = max(_work_width(request, layout, kind) for kind in kinds)
    backward = (2 * shape.hidden_size + width) * request.weight_bytes * tokens
    if layout.recompute == "full":
        backward += tokens * max(_kept_by_layer(request, layout, kind, "none") for kind in kinds)
    elif layout.recompute != "none":
        backward += tokens * max(_kept_by_layer(request, layout, kind, "none") - kept[kind] for kind in kinds)
    # autograd holds the gradient of a weight until Megatron's hook has added it to the buffer
    backward += trained.largest * request.weight_bytes
    forward = (4 * shape.hidden_size + width) * request.weight_bytes * tokens
    score: Bytes = {"workspace": int(forward), "output layer": 0}
    train: Bytes = {"activations": int(activations), "workspace": int(backward)}
    if (frozen := frozen_bytes(request, layout, stage)) is not None:
        score["gathered weights"] = train["gathered weights"] = frozen.whole
    if head.training:
        score["output layer"] = head.saved + max(0, head.scoring - int(forward))
        train["output layer"] = head.saved + max(0, head.training - int(backward))
    return score, train


def _kept_by_layer(request: PlanRequest, layout: Layout, kind: LayerKind, recompute: Recompute) -> float:
    """Bytes per token that a layer keeps for the backward pass."""
    saved = saved_by_layer(request.shape, request.kernels, request.weight_bytes, recompute, kind, layout.tensor)
    if request.adapter.is_on and recompute != "full":
        saved += saved_by_adapters(request.shape, request.adapter, request.weight_bytes, kind)
    return layer_bytes_per_token(layout, saved, request.expert_imbalance)


def _chunks(request: PlanRequest, layout: Layout, stage: int) -> set[LayerCounts]:
    """Layers of each kind, of each of the stage's chunks."""
    return {layers_of_chunk(request.shape, layout, stage, chunk) for chunk in range(layout.virtual)}


def _work_width(request: PlanRequest, layout: Layout, kind: LayerKind) -> float:
    """Elements per token of a layer's widest tensors while it works, of which three are of an MLP's width.

    Of a layer with experts, the copies of tokens are there as they were sent and as they were received. A delta net
    makes its tensors before.
    """
    shape = request.shape
    delta_net = 0.0
    if kind.has_delta_net and shape.delta is not None:
        delta_net = work_of_delta_rule(shape.delta) * FLOAT32_BYTES / request.weight_bytes / layout.tensor
    if not kind.has_experts:
        return max(delta_net, 3 * shape.ffn_size / layout.tensor)
    assert shape.experts is not None
    sent = shape.experts.experts_per_token / layout.sequence_split
    received = sent * layout.busiest_load(request.expert_imbalance)
    columns = layout.expert_tensor * shape.hidden_size + 3 * shape.experts.ffn_size
    mlp = sent * shape.hidden_size + received * columns + 3 * shape.experts.shared_ffn_size / layout.tensor
    return max(delta_net, mlp)


def _staging_on_gpu(parameters: StageParameters, layout: Layout) -> int:
    """A distributed optimizer is gathered over its replicas, one of its three tensors at a time, through the GPU."""
    if not layout.distributed_optimizer:
        return 0
    return int(sum(4 * elements * (1 + 1 / replicas) for elements, replicas in parameters.replicated(layout)))


def _host_of_rank(
    parameters: StageParameters, layout: Layout, weight_bytes: int, state: TrainerState
) -> dict[str, int]:
    """Host memory of one rank, a checkpoint of the trained parameters on its way to the disk included.

    A distributed optimizer is gathered whole by every rank: its three float32 tensors, this rank's shares of them, and
    two copies of one tensor while it is put together, which are gone when the weights are copied.
    """
    elements = parameters.num_elements
    weights = elements * weight_bytes
    staging = 12 * elements + weights
    if layout.distributed_optimizer:
        shares = sum(12 * part // replicas for part, replicas in parameters.replicated(layout))
        staging = 12 * elements + shares + max(2 * 4 * elements, weights)
    host = {"checkpoint staging": staging, "processes": hardware.HOST_PROCESS_BYTES}
    if state.optimizer_on_host:
        host["optimizer on the host"] = state.optimizer_on_host
    return host


def _host_of_worker(request: PlanRequest) -> dict[str, int]:
    """Host memory of one sampler worker."""
    host = {"processes": hardware.HOST_PROCESS_BYTES}
    return host if request.push_bytes_on_gpu else {**host, "push buffers": 2 * request.bucket_bytes}


def _trainer_reserve(layout: Layout) -> int:
    """Context, and a communicator for each axis; the embedding's and the world's are there in any case."""
    axes = [layout.tensor, layout.pipeline, layout.context, layout.data * layout.context]
    if layout.expert > 1 or layout.expert_tensor > 1:
        axes += [layout.expert, layout.expert_tensor, layout.expert * layout.expert_tensor, layout.expert_data]
    communicators = 1 + sum(size > 1 for size in axes) if layout.num_ranks > 1 else 0
    return hardware.CONTEXT_BYTES + communicators * hardware.COMMUNICATOR_BYTES


def _engine_reserve(request: PlanRequest) -> int:
    communicators = int(request.engine.tensor > 1) + int(request.engine.stages > 1)
    return hardware.CONTEXT_BYTES + hardware.ENGINE_GRAPHS_BYTES + communicators * hardware.COMMUNICATOR_BYTES


def _fragmentation(parts: Bytes) -> int:
    return int(hardware.FRAGMENTATION * sum(size for part, size in parts.items() if part in _TRANSIENT))
