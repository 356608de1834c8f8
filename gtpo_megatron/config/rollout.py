"""How responses are sampled, and how new weights reach the sampler."""

from dataclasses import dataclass
from typing import Literal

from gtpo_megatron.config.checks import (
    require_choice,
    require_fraction,
    require_non_negative,
    require_positive,
    require_types,
)
from gtpo_megatron.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingConfig:
    """The sampling distribution.

    Attributes:
        temperature: logits are divided by it, in sampling, in scoring and in the update alike; 0, the likeliest token,
            in evaluation only.
        top_p: nucleus mass; below 1 the sampler's distribution is not the scored one.
        top_k: number of candidates; 0 means all.
        max_response_tokens: a longer response is cut and flagged.
        stop_strings: a response ends with the token that completes one of them, which stays part of it.
        stop_token_ids: end a response too, besides the end-of-turn tokens that the model folder declares.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_response_tokens: int = 4096
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        require_types(self)
        require_positive(top_p=self.top_p, max_response_tokens=self.max_response_tokens)
        require_fraction(top_p=self.top_p)
        require_non_negative(temperature=self.temperature, top_k=self.top_k)
        if not all(self.stop_strings):
            raise ConfigError("stop_strings holds an empty string, which would end every response at once")
        if any(token < 0 for token in self.stop_token_ids):
            raise ConfigError(f"stop_token_ids={self.stop_token_ids!r}: token ids are 0 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig:
    """The vLLM engines.

    Attributes:
        group_size: responses a prompt, ``G``.
        sampling: the distribution that training responses come from.
        num_engines: vLLM engines; the responses of a step are dealt to them, those of one group too.
        dtype: of vLLM's weights.
        kv_cache_mib: key-value cache on each GPU of an engine; without a number vLLM takes nearly all there is.
        max_concurrent_sequences: sequences that an engine decodes together.
        tensor_parallel_size: ranks of an engine.
        max_engine_restarts: engines that may die and be replaced in a run; the next death ends it.
        entropy_source: who computes the token entropies. ``actor``: the trainer, in a scoring pass before the update.
            ``rollout``: vLLM while it samples; then there is no scoring pass, and the log-prob gap is measured by the
            update's own forward pass, before the new weights are used for anything.
        placement: ``disaggregated``: engines have GPUs of their own. ``colocated``: engines use the ranks' GPUs, in
            turns: they sleep while the trainer works, whose gradients and optimizer are on the host while they sample.
        max_staleness: 0: responses come from the weights that they train. 1: those of the next step are sampled while
            this one trains, from the weights that it started with; ``algorithm.off_policy`` corrects for that.
        partial: with ``max_staleness=1``: a push does not wait for the responses that are being sampled; they go on
            with the new weights. A run then does not repeat: which token is of which weights depends on who is faster.
    """

    group_size: int = 16
    sampling: SamplingConfig = SamplingConfig()
    num_engines: int = 1
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    kv_cache_mib: int = 16384
    max_concurrent_sequences: int = 256
    tensor_parallel_size: int = 1
    max_engine_restarts: int = 1
    entropy_source: Literal["actor", "rollout"] = "actor"
    placement: Literal["disaggregated", "colocated"] = "disaggregated"
    max_staleness: int = 0
    partial: bool = False

    def __post_init__(self) -> None:
        require_types(self)
        require_choice("entropy_source", self.entropy_source, ("actor", "rollout"))
        require_choice("placement", self.placement, ("disaggregated", "colocated"))
        require_choice("max_staleness", self.max_staleness, (0, 1))
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
                f"pushed; use max_staleness=1, or partial=False"
            )
        require_non_negative(max_engine_restarts=self.max_engine_restarts)
        require_positive(
            num_engines=self.num_engines,
            kv_cache_mib=self.kv_cache_mib,
            max_concurrent_sequences=self.max_concurrent_sequences,
            tensor_parallel_size=self.tensor_parallel_size,
        )
        if self.group_size < 2:
            raise ConfigError(
                f"group_size={self.group_size!r}: must be 2 or more; a response is judged against others of its prompt"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSyncConfig:
    """The push of new weights into the sampler after every step.

    Attributes:
        transport: how the bytes travel: ``shared_memory`` between processes of one machine, ``process_group`` over the
            network (NCCL on GPUs, gloo on CPUs), ``relay`` for colocated engines, over the network between ranks and
            then inside the GPU that a rank shares with a worker.
        bucket_mib: largest piece under way; two for each sampler worker are in memory at a time.
        deadline_s: longest time that one side of a push waits for the other.
        verify_every_steps: every so many pushes, and at the first one, both sides compare a checksum of every tensor.
        logprob_gap_limit: largest absolute difference, nats, between the sampler's and the trainer's log-prob of a
            sampled token; above it the run stops. 1e-4 suits float32 on both sides; bfloat16 needs about 1.
    """

    transport: Literal["shared_memory", "process_group", "relay"] = "shared_memory"
    bucket_mib: int = 256
    deadline_s: float = 120.0
    verify_every_steps: int = 10
    logprob_gap_limit: float = 1.0

    def __post_init__(self) -> None:
        require_types(self)
        require_positive(
            bucket_mib=self.bucket_mib,
            deadline_s=self.deadline_s,
            verify_every_steps=self.verify_every_steps,
            logprob_gap_limit=self.logprob_gap_limit,
        )
