"""Inputs of a plan: a model, a batch, an engine and the GPUs, as numbers."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from gtpo_megatron.companions.planner.activations import Kernels
from gtpo_megatron.companions.planner.engine import divides_engine
from gtpo_megatron.companions.planner.hardware import GPU
from gtpo_megatron.companions.planner.known_models import find_shape
from gtpo_megatron.companions.planner.layout import Layout
from gtpo_megatron.companions.planner.object_store import stored_bytes
from gtpo_megatron.config.adapter import AdapterConfig
from gtpo_megatron.config.checks import require_non_negative, require_positive
from gtpo_megatron.config.model import ELEMENT_BYTES
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.weights.adapter_shapes import check_adaptable
from gtpo_megatron.weights.architecture import VOCAB_MULTIPLE
from gtpo_megatron.weights.fp8_layers import check_fp8
from gtpo_megatron.weights.model_shape import ModelShape

EXPERT_IMBALANCE = 1.5
"""Copies of tokens that the busiest rank of an expert-parallel group receives, over the mean: an assumption. A run
measures it, and routers that are not balanced anew may drift away from it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """The GPUs.

    Attributes:
        gpu: rates by the data sheet.
        num_gpus: number of all GPUs.
        gpu_memory: bytes of a GPU.
        gpus_per_node: GPUs that NVLink connects.
        host_memory: bytes per node; 0: not known, and not checked.
        num_rollout_gpus: GPUs that only generate; 0: colocated, every GPU generates and trains in turn.
        num_idle_gpus: GPUs of the last node that nobody uses.
    """

    gpu: GPU
    num_gpus: int
    gpu_memory: float
    gpus_per_node: int = 8
    host_memory: float = 0.0
    num_rollout_gpus: int = 0
    num_idle_gpus: int = 0

    def __post_init__(self) -> None:
        require_positive(gpus=self.num_gpus, gpus_per_node=self.gpus_per_node, gpu_memory=self.gpu_memory)
        require_non_negative(host_memory=self.host_memory)
        if self.num_gpus > self.gpus_per_node and self.num_gpus % self.gpus_per_node:
            below = self.num_gpus // self.gpus_per_node * self.gpus_per_node
            raise ConfigError(
                f"gpus={self.num_gpus}: not a whole number of nodes of {self.gpus_per_node}; take {below} or "
                f"{below + self.gpus_per_node}, or set gpus_per_node"
            )
        if not 0 <= self.num_rollout_gpus < self.num_gpus - self.num_idle_gpus:
            raise ConfigError(
                f"rollout_gpus={self.num_rollout_gpus}: must be at least 0 (colocated) and less than gpus="
                f"{self.num_gpus}, or nothing would train"
            )

    @property
    def is_colocated(self) -> bool:
        """Every GPU generates and trains in turn."""
        return self.num_rollout_gpus == 0

    @property
    def num_trainer_gpus(self) -> int:
        """Ranks of the trainer."""
        return self.num_gpus - self.num_rollout_gpus - self.num_idle_gpus

    @property
    def num_engine_gpus(self) -> int:
        """GPUs that generate."""
        return self.num_rollout_gpus or self.num_trainer_gpus

    @property
    def num_engine_nodes(self) -> int:
        """Nodes on which engines generate."""
        return math.ceil(self.num_engine_gpus / self.gpus_per_node)


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """A training step's responses, and how they are cut.

    Attributes:
        num_responses: responses per step.
        num_update_responses: responses of one optimizer update.
        num_updates: optimizer updates per step.
        max_sequence_tokens: tokens of the longest prompt and response.
        mean_prompt_tokens: mean length of a prompt, for times only; memory is planned for the longest.
        mean_response_tokens: mean length of a response, for times only.
        max_response_tokens: tokens of the longest response.
        micro_batch_tokens: budget of a forward pass; a longer sequence makes a micro-batch of its own.
        head_chunk_tokens: tokens whose logits are made together.
    """

    num_responses: int
    num_update_responses: int
    num_updates: int
    max_sequence_tokens: int
    mean_prompt_tokens: float
    mean_response_tokens: float
    max_response_tokens: int
    micro_batch_tokens: int
    head_chunk_tokens: int

    def __post_init__(self) -> None:
        require_positive(mean_prompt_tokens=self.mean_prompt_tokens, mean_response_tokens=self.mean_response_tokens)
        max_prompt_tokens = self.max_sequence_tokens - self.max_response_tokens
        if self.mean_prompt_tokens > max_prompt_tokens or self.mean_response_tokens > self.max_response_tokens:
            raise ConfigError(
                f"mean_prompt_tokens={self.mean_prompt_tokens:g}, mean_response_tokens={self.mean_response_tokens:g}: "
                f"must be at most the longest prompt's {max_prompt_tokens} and the longest response's "
                f"{self.max_response_tokens}"
            )

    @property
    def largest_micro_batch(self) -> int:
        """Tokens, over all context-parallel ranks."""
        return max(self.micro_batch_tokens, self.max_sequence_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """One vLLM engine.

    Attributes:
        tensor: ranks of an engine that share a layer.
        stages: of its pipeline.
        nodes: that it lies on.
        weight_bytes: bytes of an element of activations, and of weights as they arrive.
        layer_bytes: bytes of an element of the weights of layers; None: as they arrive.
        cache_bytes: key-value cache on each of its GPUs.
        max_sequences: sequences that are decoded together.
        most: how many engines there are at most; 0: as many as have GPUs.
        expert_parallel: its ranks share a layer's experts, each whole, instead of the matrices of every expert.
    """

    tensor: int
    stages: int = 1
    nodes: int = 1
    weight_bytes: int
    layer_bytes: int | None = None
    cache_bytes: int
    max_sequences: int
    most: int = 0
    expert_parallel: bool = False

    @property
    def num_gpus(self) -> int:
        """Ranks of an engine."""
        return self.tensor * self.stages


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """Everything a plan is made from.

    Attributes:
        name: name of the recipe.
        model: name or folder of the model.
        own_layout: layout of the recipe; None if it is for another number of ranks.
        transport: transport of the push; ``process_group`` and ``relay`` have buckets on GPUs, the other on the host.
        bucket_bytes: size of a bucket of the push; two buckets for each sampler worker are under way.
        weight_bytes: bytes of an element of the trainer's weights.
        offload_fraction: share of the optimizer that lives on the host.
        has_scoring: the trainer computes entropies and old log-probs in a pass of its own.
        has_reference: a reference policy is on the host and scores in a pass of its own.
        resets_reference: checkpoints have its weights.
        teacher: model that scores the student's tokens in a pass of its own; None: there is none.
        teacher_is_base: it is the model below the adapters, and takes no memory.
        adapter: adapter that is trained in the place of the weights, if its rank is not 0; below it the frozen weights
            are the reference policy, and none is on the host.
        kernels: implementation of the trainer's layers.
        object_store_bytes: shared memory per node, for batches between processes.
        stored_bytes: most bytes of responses in the object store, see ``object_store.py``.
        vocab_multiple: padded vocabulary over the tensor-parallel ranks is a multiple of this.
        expert_imbalance: copies of tokens that the busiest rank of an expert-parallel group receives, over the mean.
        correction: bytes by phase that a preflight measured beyond its plan, see ``correction.py``.
    """

    name: str
    model: str
    shape: ModelShape
    cluster: Cluster
    batch: Batch
    engine: EngineSettings
    own_layout: Layout | None
    transport: str
    bucket_bytes: int
    weight_bytes: int = 2
    offload_fraction: float = 0.0
    has_scoring: bool = True
    has_reference: bool = False
    resets_reference: bool = False
    teacher: ModelShape | None = None
    teacher_is_base: bool = False
    adapter: AdapterConfig = AdapterConfig()
    kernels: Kernels = "te"
    object_store_bytes: int = 0
    stored_bytes: int = 0
    vocab_multiple: int = VOCAB_MULTIPLE
    expert_imbalance: float = EXPERT_IMBALANCE
    correction: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._check_engine()
        if self.expert_imbalance < 1 or not math.isfinite(self.expert_imbalance):
            raise ConfigError(
                f"expert_imbalance={self.expert_imbalance}: the busiest rank's load over the mean is at least 1; "
                f"1 is a router in balance, {EXPERT_IMBALANCE} is assumed if nothing is given"
            )
        if self.batch.max_sequence_tokens > self.shape.max_positions:
            raise ConfigError(
                f"model.max_sequence_tokens={self.batch.max_sequence_tokens} exceeds max_position_embeddings="
                f"{self.shape.max_positions} of {self.model}"
            )

    def divides_engine(self, tensor: int) -> bool:
        """Whether so many ranks in each stage divide the GPUs that generate, and the model."""
        return self.cluster.num_engine_gpus % (tensor * self.engine.stages) == 0 and divides_engine(
            self.shape, tensor, expert_parallel=self.engine.expert_parallel
        )

    def _check_engine(self) -> None:
        tensor, gpus = self.engine.tensor, self.cluster.num_engine_gpus
        if not self.divides_engine(tensor):
            fitting = [t for t in range(1, gpus + 1) if self.divides_engine(t)]
            parts = "heads and experts" if self.engine.expert_parallel else "heads and MLP"
            raise ConfigError(
                f"rollout.tensor_parallel_size={tensor}: must divide the {gpus} GPUs that generate, and {parts} of "
                f"{self.model}; choose from {fitting}"
            )
        if self.engine.stages > self.shape.num_layers:
            raise ConfigError(
                f"rollout.pipeline_parallel_size={self.engine.stages}: {self.model} has {self.shape.num_layers} layers"
            )
        if self.engine.num_gpus > (room := self.engine.nodes * self.cluster.gpus_per_node):
            raise ConfigError(
                f"an engine of {self.engine.num_gpus} GPUs (rollout.tensor_parallel_size={tensor} x "
                f"pipeline_parallel_size={self.engine.stages}) on rollout.nodes_per_engine={self.engine.nodes} has "
                f"{room}; take --rollout.nodes-per-engine {-(-self.engine.num_gpus // self.cluster.gpus_per_node)}"
            )

    @property
    def adapter_bytes(self) -> int:
        """Per element of an adapter."""
        return ELEMENT_BYTES["float32"] if self.adapter.dtype == "float32" else self.weight_bytes

    @property
    def has_host_reference(self) -> bool:
        """A reference policy's weights are on the host."""
        return self.has_reference and not self.adapter.is_on

    @property
    def has_host_teacher(self) -> bool:
        """A teacher's weights are on the host."""
        return self.teacher is not None and not self.teacher_is_base

    @property
    def of_teacher(self) -> "PlanRequest":
        """The request with the teacher in the place of the model, for its scoring pass; there must be one."""
        assert self.teacher is not None
        return replace(
            self, shape=self.teacher, teacher=None, adapter=AdapterConfig(), engine=replace(self.engine, tensor=1)
        )

    @property
    def push_bytes_on_gpu(self) -> int:
        """Bytes of one side's buckets on the GPU, where they stay between pushes."""
        return 2 * self.bucket_bytes if self.transport in ("process_group", "relay") else 0

    @property
    def num_engines(self) -> int:
        """Engines that share the prompts."""
        filled = self.cluster.num_engine_gpus // self.engine.num_gpus
        return min(self.engine.most or filled, filled)


def gpus_of(config: RunConfig) -> tuple[int, int]:
    """How many GPUs a recipe's ranks use, and how many more its engines: none if they use the ranks'."""
    rollout = config.rollout
    apart = rollout.placement == "disaggregated"
    return config.parallel.num_ranks, rollout.num_engines * rollout.ranks_per_engine if apart else 0


def with_engines_apart(config: RunConfig, num_rollout_gpus: int) -> RunConfig:
    """The recipe with as many engines as so many GPUs of their own hold; the request checks that they divide them."""
    engines = max(1, num_rollout_gpus // config.rollout.ranks_per_engine)
    return replace(
        config,
        rollout=replace(config.rollout, placement="disaggregated", num_engines=engines),
        weight_sync=replace(config.weight_sync, transport="auto"),
    )


def request_from(
    config: RunConfig,
    cluster: Cluster,
    *,
    mean_prompt_tokens: float = 0.0,
    mean_response_tokens: float = 0.0,
    expert_imbalance: float = EXPERT_IMBALANCE,
) -> PlanRequest:
    """A recipe on given GPUs.

    Args:
        config: of the run.
        cluster: may have another number of GPUs than the recipe; see ``gpus_of``.
        mean_prompt_tokens: for times; 0: an eighth of the longest.
        mean_response_tokens: for times; 0: half of the longest.
        expert_imbalance: of a mixture of experts, as in ``PlanRequest``.

    Raises:
        ConfigError: an unknown model, or an engine that does not divide the GPUs or the model.
    """
    shape, sampling = find_shape(config.model.path), config.rollout.sampling
    prompts, group = config.data.prompts_per_step, config.rollout.group_size
    is_own = config.parallel.num_ranks == cluster.num_trainer_gpus
    batch = Batch(
        num_responses=prompts * group,
        num_update_responses=(config.update.mini_batch_prompts or prompts) * group,
        num_updates=config.update.updates_per_rollout,
        max_sequence_tokens=config.data.max_prompt_tokens + sampling.max_response_tokens,
        mean_prompt_tokens=mean_prompt_tokens or config.data.max_prompt_tokens / 8,
        mean_response_tokens=mean_response_tokens or sampling.max_response_tokens / 2,
        max_response_tokens=sampling.max_response_tokens,
        micro_batch_tokens=config.update.micro_batch_tokens,
        head_chunk_tokens=config.model.head_chunk_tokens,
    )
    check_adaptable(shape, config.adapter)
    if config.rollout.dtype == "fp8":
        check_fp8(shape)
        if not cluster.gpu.has_fp8:
            raise ConfigError("rollout.dtype='fp8': these GPUs have no products in FP8; use rollout.dtype='bfloat16'")
    return PlanRequest(
        name=config.name,
        model=config.model.path,
        shape=shape,
        cluster=cluster,
        batch=batch,
        engine=EngineSettings(
            tensor=config.rollout.tensor_parallel_size,
            stages=config.rollout.pipeline_parallel_size,
            nodes=config.rollout.nodes_per_engine,
            weight_bytes=ELEMENT_BYTES[config.rollout.activation_dtype],
            layer_bytes=ELEMENT_BYTES[config.rollout.dtype],
            cache_bytes=config.rollout.gpu_cache_mib << 20,
            max_sequences=config.rollout.max_concurrent_sequences,
            most=config.rollout.num_engines if is_own else 0,
            expert_parallel=config.rollout.expert_parallel,
        ),
        own_layout=_own_layout(config, shape) if is_own else None,
        transport=config.transport(has_gpus=True),
        bucket_bytes=config.weight_sync.bucket_mib << 20,
        weight_bytes=ELEMENT_BYTES[config.model.dtype],
        offload_fraction=config.optimizer.offload_fraction,
        has_scoring=config.rollout.entropy_source == "actor",
        has_reference=config.has_reference,
        resets_reference=config.reference.reset_every_steps > 0,
        teacher=find_shape(config.teacher.path) if config.teacher.path else None,
        teacher_is_base=bool(config.teacher.path) and not config.has_own_teacher,
        adapter=config.adapter,
        object_store_bytes=config.cluster.object_store_mib << 20,
        stored_bytes=stored_bytes(config, shape, num_engine_nodes=cluster.num_engine_nodes),
        expert_imbalance=expert_imbalance,
    )


def _own_layout(config: RunConfig, shape: ModelShape) -> Layout:
    """The recipe's layout.

    Raises:
        ConfigError: the layout does not divide the model, or its teacher.
    """
    parallel, models = config.parallel, {config.model.path: shape}
    if config.teacher.path:
        models[config.teacher.path] = find_shape(config.teacher.path)
    for path, one in models.items():
        try:
            one.check_layout(parallel)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
    return Layout(
        num_ranks=parallel.num_ranks,
        tensor=parallel.tensor_parallel_size,
        pipeline=parallel.pipeline_parallel_size,
        virtual=parallel.virtual_pipeline_size,
        last_layers=parallel.last_stage_layers,
        context=parallel.context_parallel_size,
        expert=parallel.expert_parallel_size,
        expert_tensor=parallel.expert_tensor_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        distributed_optimizer=parallel.distributed_optimizer,
        recompute=config.model.recompute,
    )
