"""How responses are sampled, how new weights reach the sampler, and how far it may differ from the trainer."""

from typing import Literal, TypeAlias

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from gtpo_megatron.config.checks import divisors, require_fraction
from gtpo_megatron.config.configuration import configuration
from gtpo_megatron.errors import ConfigError


@configuration
class LearntLimits:
    """Limits learnt from steps whose weights were verified by checksums.

    Attributes:
        factor: a figure may be so many times that of the last verified step, or of the least value of the dtypes if
            that is larger.
    """

    factor: float = 3.0

    def __post_init__(self) -> None:
        if self.factor <= 1:
            raise ConfigError(f"factor={self.factor}: must be greater than 1, or the verified step itself would stop")


@configuration
class GivenLimits:
    """Limits for a model whose figures are known.

    Attributes:
        scaled_nats: limit of ``sync/logprob_gap_scaled``.
        bound_nats: a token with a larger gap is beyond the bound.
        beyond_frac: share of tokens that may be beyond the bound; 0: none.
    """

    scaled_nats: PositiveFloat
    bound_nats: PositiveFloat
    beyond_frac: float

    def __post_init__(self) -> None:
        require_fraction(beyond_frac=self.beyond_frac)


MismatchLimits: TypeAlias = LearntLimits | GivenLimits
"""Either kind."""


Transport = Literal["shared_memory", "process_group", "relay"]
"""How the bytes of a push travel; see ``WeightSyncConfig``."""

EngineDtype: TypeAlias = Literal["float32", "bfloat16", "fp8"]
"""Dtype of an engine's weights; ``fp8``: of those of its linear layers and experts, the rest is bfloat16.

E4M3 times a scale for each row of a matrix (output channel), made from the bfloat16 weights of every push; activations
are rounded to E4M3, too, with a scale a token (vLLM's ``fp8_per_channel``).
"""

GPU_CACHE_MIB = 16384
"""On a GPU, where no number is given; vLLM itself would take nearly all there is."""

LARGEST_STALENESS = 64
"""More would keep whole epochs of responses in memory."""

LEAST_TEMPERATURE = 0.01
"""vLLM samples at this one where a lower one above 0 is asked for, and gives log-probs of it."""


@configuration
class SamplingConfig:
    """The sampling distribution.

    Attributes:
        temperature: logits are divided by it, in sampling, in scoring and in the update alike; at least 0.01, or 0,
            the likeliest token, in evaluation only.
        top_p: nucleus mass; below 1 the sampler's distribution is not the scored one.
        top_k: number of candidates; 0 means all.
        max_response_tokens: a longer response is cut and flagged.
        stop_strings: a response ends with the token that completes one of them, which stays part of it.
        stop_token_ids: end a response too, besides the end-of-turn tokens that the model folder declares.
    """

    temperature: NonNegativeFloat = 1.0
    top_p: PositiveFloat = 1.0
    top_k: NonNegativeInt = 0
    max_response_tokens: PositiveInt = 4096
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        require_fraction(top_p=self.top_p)
        if 0 < self.temperature < LEAST_TEMPERATURE:
            raise ConfigError(
                f"temperature={self.temperature!r}: must be {LEAST_TEMPERATURE} or more, or 0 in evaluation; below, "
                f"vLLM would sample at {LEAST_TEMPERATURE}, and the trainer score another distribution"
            )
        if not all(self.stop_strings):
            raise ConfigError("stop_strings holds an empty string, which would end every response at once")
        if any(token < 0 for token in self.stop_token_ids):
            raise ConfigError(f"stop_token_ids={self.stop_token_ids!r}: token ids are 0 or more")


@configuration
class RolloutConfig:
    """The vLLM engines.

    Attributes:
        group_size: responses a prompt, ``G``.
        sampling: the distribution that training responses come from.
        num_engines: vLLM engines; the responses of a step are dealt to them, those of one group too.
        dtype: dtype of vLLM's weights. ``fp8`` samples from a policy of rounded weights, so
            ``algorithm.off_policy`` must correct for it.
        head_dtype: dtype in which vLLM computes logits: ``float32``, as the trainer's output layer always does, or
            ``model``: in ``dtype``. The output layer's weights are of ``dtype`` in both cases; for fp8 of bfloat16.
        kv_cache_mib: key-value cache in each process of an engine. None: on a GPU 16384, on a CPU what
            ``max_concurrent_sequences`` can fill, but no more than a quarter of the free memory.
        max_concurrent_sequences: sequences that an engine decodes together.
        tensor_parallel_size: ranks of an engine that share its layers' matrices.
        pipeline_parallel_size: groups of such ranks, each with some of the layers.
        nodes_per_engine: nodes that an engine's ranks lie on, as many on each.
        expert_parallel: each rank of an engine holds some of the experts of a mixture, whole, in place of
            a part of each; everything else stays tensor parallel. Needs GPUs.
        max_engine_restarts: engines that may die and be replaced in a run; the next death ends it.
        entropy_source: origin of the token entropies. ``actor``: the trainer, in a scoring pass before the update.
            ``rollout``: vLLM while it samples; then there is no scoring pass, and the log-prob gap is measured by the
            update's own forward pass, before the new weights are used for anything.
        placement: ``disaggregated``: engines have GPUs of their own. ``colocated``: engines use the ranks' GPUs, in
            turns: they sleep while the trainer works, whose gradients and optimizer are on the host while they sample.
        returns_routing: mixtures of experts: responses carry the experts that the sampler's routers chose, for
            ``update.routing_replay='rollout'``, or to measure how often the trainer's routers choose others. On a CPU
            the engine then has no prefix cache.
        max_staleness: ``N``: the weights that sampled a response's oldest token are at most so many pushes older than
            those that it trains. 0: nothing is sampled while the trainer works. 1: the responses of the next step are
            sampled meanwhile, from the weights that this one started with. 2 and more: engines sample all the time, and
            a step takes the oldest whole groups. ``algorithm.off_policy`` corrects for it.
        partial: pushes in mid-response, with ``max_staleness`` of at least 1: a push does not wait for the responses
            that are being sampled; they go on with the new weights.
        over_sample: groups under way for each group that a step takes; None: ``max_staleness + 1``, beyond which some
            are certain to be given up. Less: fresher responses. More: the step starts without the slowest.
        stragglers: a group that would be too old for the next step is waited for, or aborted: then its prompt is
            sampled again, before any new one, and waited for at its third try.
    """

    group_size: int = 16
    sampling: SamplingConfig = SamplingConfig()
    num_engines: PositiveInt = 1
    dtype: EngineDtype = "bfloat16"
    head_dtype: Literal["float32", "model"] = "float32"
    kv_cache_mib: PositiveInt | None = None
    max_concurrent_sequences: PositiveInt = 256
    tensor_parallel_size: PositiveInt = 1
    pipeline_parallel_size: PositiveInt = 1
    nodes_per_engine: PositiveInt = 1
    expert_parallel: bool = False
    max_engine_restarts: NonNegativeInt = 1
    entropy_source: Literal["actor", "rollout"] = "actor"
    placement: Literal["disaggregated", "colocated"] = "disaggregated"
    returns_routing: bool = False
    max_staleness: int = 0
    partial: bool = False
    over_sample: float | None = None
    stragglers: Literal["wait", "abort"] = "wait"

    def __post_init__(self) -> None:
        if not 0 <= self.max_staleness <= LARGEST_STALENESS:
            raise ConfigError(f"max_staleness={self.max_staleness}: must lie between 0 and {LARGEST_STALENESS} pushes")
        if self.max_staleness and self.entropy_source == "rollout":
            raise ConfigError(
                f"max_staleness={self.max_staleness} with entropy_source='rollout': the trainer has moved on when it "
                f"learns from such responses, so it must score them itself; use entropy_source='actor'"
            )
        if self.max_staleness and self.placement == "colocated":
            raise ConfigError(
                f"max_staleness={self.max_staleness} with placement='colocated': engines and trainer take turns on "
                f"the same GPUs, so nothing can be sampled while the trainer works; use placement='disaggregated'"
            )
        if self.partial and self.max_staleness == 0:
            raise ConfigError(
                f"partial=True with max_staleness={self.max_staleness}: no response is being sampled when weights are "
                f"pushed; use max_staleness=1 or more, or partial=False"
            )
        self._check_over_sample()
        self._check_ranks()
        if self.expert_parallel and self.tensor_parallel_size == 1:
            raise ConfigError(
                "expert_parallel=True with tensor_parallel_size=1: one rank holds all experts anyway; take more ranks, "
                "or switch it off"
            )
        if self.group_size < 2:
            raise ConfigError(
                f"group_size={self.group_size!r}: must be 2 or more; a response is judged against others of its prompt"
            )

    @property
    def activation_dtype(self) -> Literal["float32", "bfloat16"]:
        """Dtype of activations and keys and values, and in which weights arrive."""
        return "bfloat16" if self.dtype == "fp8" else self.dtype

    @property
    def ranks_per_engine(self) -> int:
        """VLLM's workers of an engine: tensor x pipeline."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def ranks_per_node(self) -> int:
        """Workers of an engine on each of its nodes."""
        return self.ranks_per_engine // self.nodes_per_engine

    @property
    def gpu_cache_mib(self) -> int:
        """The key-value cache of an engine's process on a GPU, MiB."""
        return GPU_CACHE_MIB if self.kv_cache_mib is None else self.kv_cache_mib

    @property
    def is_continuous(self) -> bool:
        """Whether groups are scheduled one by one, in place of all groups of a step together."""
        return self.max_staleness > 1 or self.partial or self.over_sample is not None

    @property
    def is_kept_between_steps(self) -> bool:
        """Whether a step can leave responses or prompts to later ones."""
        return self.max_staleness > 0 or self.is_continuous

    def _check_ranks(self) -> None:
        if self.ranks_per_engine % self.nodes_per_engine:
            raise ConfigError(
                f"nodes_per_engine={self.nodes_per_engine} must divide the {self.ranks_per_engine} ranks of an engine "
                f"(tensor_parallel_size x pipeline_parallel_size); choose from {divisors(self.ranks_per_engine)}"
            )
        if self.pipeline_parallel_size == 1:
            return
        stages = f"pipeline_parallel_size={self.pipeline_parallel_size}"
        if self.partial:
            raise ConfigError(
                f"partial=True with {stages}: a push would meet tokens between two stages, of which one has the new "
                f"weights and one the old; use partial=False, or more tensor_parallel_size in place of stages"
            )
        if self.entropy_source == "rollout" or self.returns_routing:
            name = "returns_routing=True" if self.returns_routing else "entropy_source='rollout'"
            raise ConfigError(
                f"{name} with {stages}: no worker of a pipeline sees all layers and the logits; use "
                f"entropy_source='actor' and returns_routing=False, or more tensor_parallel_size in place of stages"
            )

    def _check_over_sample(self) -> None:
        if self.over_sample is None:
            if self.stragglers == "abort" and not self.is_continuous:
                raise ConfigError(
                    f"stragglers='abort' with max_staleness={self.max_staleness}: the step needs all groups that are "
                    f"sampled; set over_sample above 1 (1.25, say), or use stragglers='wait'"
                )
            return
        if self.over_sample < 1:
            raise ConfigError(
                f"over_sample={self.over_sample!r}: must be 1 or more, the groups under way for each that a step takes"
            )
        if self.over_sample > self.max_staleness + 1 and self.stragglers == "wait":
            raise ConfigError(
                f"over_sample={self.over_sample:g} with max_staleness={self.max_staleness} and stragglers='wait': more "
                f"than {self.max_staleness + 1} groups for each one cannot all be trained in time; use "
                f"stragglers='abort', or over_sample={self.max_staleness + 1}"
            )


@configuration
class WeightSyncConfig:
    """The push of new weights into the sampler after every step.

    Attributes:
        transport: how the bytes travel: ``shared_memory`` between processes of one machine, ``process_group`` over the
            network (NCCL on GPUs, gloo on CPUs), ``relay`` for colocated engines, over the network between ranks and
            then inside the GPU that a rank shares with a worker. ``auto``: on GPUs ``relay`` or ``process_group``, as
            the placement is; without them ``shared_memory``, or ``process_group`` if an engine has several nodes.
        bucket_mib: largest piece under way; two for each sampler worker are in memory at a time.
        deadline_s: longest time that one side of a push waits for the other.
        verify_every_steps: every so many pushes, and at the first one, both sides compare a checksum of every tensor.
        mismatch: limits of the difference between the sampler's and the trainer's log-probs of the sampled tokens;
            beyond one of them the run stops.
    """

    transport: Literal["auto", "shared_memory", "process_group", "relay"] = "auto"
    bucket_mib: PositiveInt = 256
    deadline_s: PositiveFloat = 120.0
    verify_every_steps: PositiveInt = 10
    mismatch: MismatchLimits = LearntLimits()
