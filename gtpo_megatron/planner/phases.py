"""Bytes by part, per rank of a stage, in every phase of a step.

Colocated, a step goes as ``orchestration/stages/colocation.py`` says: generate (engine awake, the trainer's gradients
freed and its optimizer in pinned host memory), score and train (engine asleep, gradients and optimizer back), push (the
engine's weights awake, its cache not), save (engine asleep, its weights on the host).
Disaggregated, a rollout GPU knows generate and push, a trainer GPU score, train, push and save. Where vLLM computes the
entropies there is no scoring.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from gtpo_megatron.planner import hardware
from gtpo_megatron.planner.activations import (
    in_flight,
    layer_bytes_per_token,
    layers_of_chunk,
    saved_by_final_norm,
    saved_by_layer,
)
from gtpo_megatron.planner.engine import EngineMemory, engine_memory
from gtpo_megatron.planner.layout import Layout
from gtpo_megatron.planner.output_layer import OutputLayerMemory, output_layer
from gtpo_megatron.planner.request import PlanRequest
from gtpo_megatron.planner.trainer_state import StageParameters, TrainerState, stage_parameters, trainer_state

Phase = Literal["generate", "score", "train", "push", "save"]
PHASES: tuple[Phase, ...] = ("generate", "score", "train", "push", "save")

Part = Literal[
    "weights",
    "gradients",
    "optimizer",
    "activations",
    "output layer",
    "workspace",
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

_TRANSIENT = frozenset[Part]({"activations", "output layer", "workspace", "vLLM workspace", "push buffers"})
"""Parts that come and go within a step, and so fragment what the allocator holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GPUMemory:
    """One kind of GPU in a plan.

    Attributes:
        role: ``stage 3`` or ``engine``.
        phases: bytes by part, in the phases it knows.
        host: bytes of host memory that go with it, by what for.
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
    state = trainer_state(
        parameters, layout, weight_bytes=request.weight_bytes, offload_fraction=request.offload_fraction
    )
    head = _head(request, layout) if stage == layout.pipeline - 1 else OutputLayerMemory()
    score, train = _forward_and_backward(request, layout, stage, parameters, head)
    held: Bytes = {"weights": state.weights, "gradients": state.gradients, "optimizer": state.optimizer}
    # a slice that is not contiguous is copied on the GPU before it goes into a bucket
    push: Bytes = {"push buffers": parameters.largest * request.weight_bytes}
    phases: dict[Phase, Bytes] = {
        "train": {**held, **train},
        "push": {**held, **push},
        "save": {**held, "checkpoint staging": _staging_on_gpu(parameters, layout)},
    }
    if request.has_scoring:
        phases = {"score": {**held, **score}, **phases}
    host = _host_of_rank(parameters, layout, state)
    reserve = hardware.DRIVER_BYTES + _trainer_reserve(layout)
    if request.cluster.is_colocated:
        # the last push is checked by responses that are scored while the engine stays awake
        phases = {"generate": {"weights": state.weights, **score}, **phases}
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
    return GPUMemory(role=f"stage {stage}", phases=phases, host=host)


def engine_gpu(request: PlanRequest) -> GPUMemory:
    """A GPU that only generates."""
    phases: dict[Phase, Bytes] = {"generate": {}, "push": {}}
    _add_engine(phases, request)
    for parts in phases.values():
        _add_buckets(parts, request, sides=1)
        parts["reserve"] = hardware.DRIVER_BYTES + _engine_reserve(request) + _fragmentation(parts)
    return GPUMemory(role="engine", phases=phases, host=_host_of_worker(request))


def node_host(request: PlanRequest, rank: GPUMemory) -> dict[str, int]:
    """Host memory of the fullest node, by what for.

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
    engine = {} if cluster.is_colocated else engine_gpu(request).host
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
        weight_bytes=request.engine.weight_bytes,
        max_sequences=request.engine.max_sequences,
        sequence_tokens=request.batch.max_sequence_tokens,
    )


def _add_engine(phases: dict[Phase, Bytes], request: PlanRequest) -> None:
    """The engine's parts: all of it while generating, weights and what a push needs in the push."""
    engine = engine_of(request)
    phases["generate"]["vLLM weights"] = engine.weights
    phases["generate"]["KV cache"] = request.engine.cache_bytes
    phases["generate"]["vLLM workspace"] = engine.workspace
    phases["push"]["vLLM weights"] = engine.weights
    # buckets are unpacked into tensors of full shape, as vLLM's loader wants them; and a layer is there twice
    vocabulary = request.shape.vocab_size * request.shape.hidden_size * request.engine.weight_bytes
    unpacked = max(vocabulary, request.engine.tensor * request.bucket_bytes)
    phases["push"]["push buffers"] = phases["push"].get("push buffers", 0) + unpacked + engine.layer


def _add_buckets(parts: Bytes, request: PlanRequest, *, sides: int) -> None:
    """Buckets of the push that are on the GPU stay there between pushes."""
    if request.push_bytes_on_gpu:
        parts["push buffers"] = parts.get("push buffers", 0) + sides * request.push_bytes_on_gpu


def _head(request: PlanRequest, layout: Layout) -> OutputLayerMemory:
    unit = layout.tensor * request.vocab_multiple
    return output_layer(
        tokens=-(-request.batch.largest_micro_batch // layout.context),
        hidden_size=request.shape.hidden_size,
        vocab_rows=-(-request.shape.vocab_size // unit) * request.vocab_multiple,
        chunk_tokens=request.batch.head_chunk_tokens,
        weight_bytes=request.weight_bytes,
        gathers=layout.sequence_parallel,
    )


def _forward_and_backward(
    request: PlanRequest, layout: Layout, stage: int, parameters: StageParameters, head: OutputLayerMemory
) -> tuple[Bytes, Bytes]:
    """What comes and goes while scoring, and while training.

    Work within a layer: its activations without the sharding of sequence parallelism, and the gradients of the widest
    ones. The output layer and the last layer's backward pass are not at work at once.
    """
    shape, batch = request.shape, request.batch
    tokens = -(-batch.largest_micro_batch // layout.context)
    saved = saved_by_layer(shape, request.kernels, request.weight_bytes, layout.recompute)
    per_layer = layer_bytes_per_token(layout, saved)
    per_replica = -(-batch.num_update_responses // layout.data) * batch.max_sequence_tokens
    num_micro_batches = max(1, -(-per_replica // batch.largest_micro_batch))
    chunks = in_flight(layout, stage, num_micro_batches)
    activations = chunks * layers_of_chunk(shape, layout) * per_layer * tokens
    if stage == layout.pipeline - 1:
        final = saved_by_final_norm(shape, request.kernels, request.weight_bytes)
        activations += layer_bytes_per_token(layout, final) * tokens
    width = shape.ffn_size / layout.tensor
    if shape.experts is not None:
        width = shape.experts.experts_per_token * shape.experts.ffn_size / layout.sequence_split
    backward = (2 * shape.hidden_size + 3 * width) * request.weight_bytes * tokens
    if layout.recompute == "full":
        whole = saved_by_layer(shape, request.kernels, request.weight_bytes, "none")
        backward += layer_bytes_per_token(layout, whole) * tokens
    # autograd holds the gradient of a weight until Megatron's hook has added it to the buffer
    backward += parameters.largest * request.weight_bytes
    forward = (4 * shape.hidden_size + 3 * width) * request.weight_bytes * tokens
    score: Bytes = {"workspace": int(forward), "output layer": 0}
    train: Bytes = {"activations": int(activations), "workspace": int(backward)}
    if head.training:
        score["output layer"] = head.saved + max(0, head.scoring - int(forward))
        train["output layer"] = head.saved + max(0, head.training - int(backward))
    return score, train


def _staging_on_gpu(parameters: StageParameters, layout: Layout) -> int:
    """A distributed optimizer is gathered over its replicas, one of its three tensors at a time, through the GPU."""
    if not layout.distributed_optimizer:
        return 0
    experts = parameters.num_expert_elements
    copies = 1 + 1 / (layout.data * layout.context)
    return int(4 * ((parameters.num_elements - experts) * copies + experts * (1 + 1 / layout.expert_data)))


def _host_of_rank(parameters: StageParameters, layout: Layout, state: TrainerState) -> dict[str, int]:
    """Host memory of one rank, a checkpoint on its way to the disk included.

    A distributed optimizer is gathered whole by every rank: its three float32 tensors, this rank's shares of them, and
    two copies of one tensor while it is put together, which are gone when the weights are copied.
    """
    elements = parameters.num_elements
    staging = 12 * elements + state.weights
    if layout.distributed_optimizer:
        shares = 12 * elements // (layout.data * layout.context)
        staging = 12 * elements + shares + max(2 * 4 * elements, state.weights)
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
    axes = (layout.tensor, layout.pipeline, layout.context, layout.expert, layout.data * layout.context)
    communicators = 1 + sum(size > 1 for size in axes) if layout.num_ranks > 1 else 0
    return hardware.CONTEXT_BYTES + communicators * hardware.COMMUNICATOR_BYTES


def _engine_reserve(request: PlanRequest) -> int:
    communicators = int(request.engine.tensor > 1)
    return hardware.CONTEXT_BYTES + hardware.ENGINE_GRAPHS_BYTES + communicators * hardware.COMMUNICATOR_BYTES


def _fragmentation(parts: Bytes) -> int:
    return int(hardware.FRAGMENTATION * sum(size for part, size in parts.items() if part in _TRANSIENT))
