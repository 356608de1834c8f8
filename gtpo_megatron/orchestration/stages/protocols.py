"""Protocols of the stages of a training step, which the in-process and the Ray run implement.

Responses stay where they were sampled until a rank fetches them (``stages/rollouts.py``); scores and credit stay in the
trainer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from gtpo_megatron.batch import Problem, PromptBatch, RewardBatch, RolloutBatch, TokenRecord
from gtpo_megatron.config.rollout import SamplingConfig
from gtpo_megatron.mismatch.gap_report import GapReport
from gtpo_megatron.observability.metrics import Metric
from gtpo_megatron.observability.timers import StageTimers
from gtpo_megatron.orchestration.stages.rollouts import RolloutHandle
from gtpo_megatron.weights.push.sync import WeightSync

Metrics = dict[str, Metric]


@dataclass(frozen=True, order=True, slots=True)
class Attempt:
    """One try to sample a group; the results of a try that was given up are ignored.

    Attributes:
        group: label of the group.
        number: of the try, from 0.
    """

    group: int
    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceEnd:
    """The end of a slice of one engine.

    Attributes:
        engine: index of the engine.
        groups: complete groups.
        is_lost: the engine died, or waits for its first push after a replacement; everything in it is lost.
    """

    engine: int
    groups: Mapping[Attempt, RolloutHandle]
    is_lost: bool = False


class GroupSampler(Protocol):
    """All engines, sampling group by group in slices of time; a push can happen between two. Used by one thread."""

    def begin_slice(self, engine: int, begin: Mapping[Attempt, Problem], abort: Sequence[Attempt]) -> None:
        """Starts a slice on an idle engine, in which it also works on everything that it has not finished.

        Args:
            engine: index of the engine.
            begin: groups to begin.
            abort: groups to forget.
        """
        ...

    def ended_slices(self) -> list[SliceEnd]:
        """Waits until at least one slice has ended; returns those that have.

        Raises:
            GTPOError: an engine raised, or has not answered in time.
        """
        ...


class Engine(Protocol):
    """(2) Sampling, and the sampler's side of (9)."""

    @property
    def num_restarts(self) -> int:
        """Number of engines that died and were replaced since this process started."""
        ...

    def generate(
        self, prompts: PromptBatch, sampling: SamplingConfig, *, samples_per_prompt: int, seed: int
    ) -> RolloutHandle:
        """Samples responses, prompt-major."""
        ...

    def forget_prefixes(self) -> None:
        """Empties the prefix cache, so that the next generation does not depend on earlier ones."""
        ...

    def sleep(self, *, keep_weights: bool) -> None:
        """Releases GPU memory; the weights move to the host or are dropped."""
        ...

    def wake(self, what: Literal["weights", "kv_cache"]) -> None:
        """Allocates GPU memory again."""
        ...

    def unattended(self) -> "Engine":
        """The same engines for another thread, in which a death raises EngineLostError instead of a restart."""
        ...

    def group_sampler(self, sampling: SamplingConfig, *, samples_per_prompt: int, seed: int) -> GroupSampler:
        """The engines for the thread of a continuous run."""
        ...

    def replace_lost(self) -> bool:
        """Restarts engines that other threads reported as lost; returns whether there were any. They need a push."""
        ...

    def abandon(self) -> None:
        """Ends all engines, and so all calls that wait for them."""
        ...

    def hold(self, rollouts: RolloutBatch) -> RolloutHandle:
        """The handle of responses that are in this process; the inverse of ``RolloutHandle.fetch``."""
        ...


class RewardStage(Protocol):
    """(3) Rewards."""

    def score(self, rollouts: RolloutHandle, prompts: PromptBatch) -> RewardBatch:
        """The outcome reward of every response."""
        ...


class Actor(Protocol):
    """(4) to (8) and the trainer's side of (9): all Megatron ranks together.

    The ranks hold one batch from scoring until it is released. Every stage works on it and returns merged metrics. A
    stage that is called out of order raises StageOrderError.
    """

    def score_tokens(self, rollouts: RolloutHandle) -> Metrics:
        """Computes old log-probs and entropies of the responses."""
        ...

    def use_sampler_scores(self, rollouts: RolloutHandle) -> Metrics:
        """Uses the sampler's log-probs and entropies as the old policy's, without a forward pass."""
        ...

    def assign_credit(self, rewards: RewardBatch) -> Metrics:
        """Computes shaped rewards and advantages of the scored batch; they do not depend on the sharding."""
        ...

    def update(self, *, step: int) -> Metrics:
        """Runs the optimizer updates of a step."""
        ...

    def sample_records(self, group_ids: Sequence[int]) -> list[TokenRecord]:
        """Returns the responses of the chosen groups with entropies and credit, after credit or update."""
        ...

    def explain_gap(self, typical_nats: float) -> GapReport:
        """Says where the log-prob gaps of the held responses are; after scoring, or after an update without it."""
        ...

    def expert_load(self) -> dict[int, list[int]]:
        """Tokens that each expert got at the last step, by layer; empty for a dense model."""
        ...

    def release_batch(self) -> None:
        """Frees the batch; the next scoring does so too."""
        ...

    def offload(self) -> None:
        """Moves gradients and optimizer state to the host."""
        ...

    def onload(self) -> None:
        """Moves gradients and optimizer state back to the GPU."""
        ...

    def begin_save(self, folder: Path, *, in_background: bool) -> None:
        """Every rank takes a snapshot and starts to write its part of a checkpoint."""
        ...

    def is_save_written(self) -> bool:
        """Whether every rank has written its part, or failed to."""
        ...

    def finish_save(self) -> dict[str, str]:
        """Waits until every rank has written its part; returns the checksum of every file, by name."""
        ...

    def load(self, folder: Path, *, checksums: Mapping[str, str]) -> None:
        """Every rank compares the files with the checksums and restores its part of a checkpoint."""
        ...


class MemorySharing(Protocol):
    """Moves GPU memory between engines and trainer if they share GPUs."""

    def to_trainer(self, *, keep_weights: bool = False) -> None:
        """Gives it to the trainer, for start, scoring, updates and checkpoints (``keep_weights`` of the engine)."""
        ...

    def to_push(self) -> None:
        """Prepares a push."""
        ...

    def to_engine(self) -> None:
        """Gives it to the engine; call it after a push, or after ``to_trainer(keep_weights=True)`` and ``to_push``."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Stages:
    """The stages of a training step, with their timers."""

    engine: Engine
    reward: RewardStage
    actor: Actor
    weight_sync: WeightSync
    memory_sharing: MemorySharing
    timers: StageTimers
