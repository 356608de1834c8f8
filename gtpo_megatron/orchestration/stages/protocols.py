"""What a training step is made of. Local and Ray runs differ only in who builds these parts.

A rollout handle stands for responses that lie where engines left them: in one process it is the data itself, under Ray
references to it. The driver sees the handle's summary only, a few numbers per response. Scores and credit stay in the
trainer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Tensor

from gtpo_megatron.batch import PromptBatch, RewardBatch, RolloutBatch, TokenRecord
from gtpo_megatron.config.rollout import SamplingConfig
from gtpo_megatron.observability.metrics import Metric
from gtpo_megatron.observability.timers import StageTimers
from gtpo_megatron.weights.push.sync import WeightSync

Metrics = dict[str, Metric]


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutHandle:
    """Sampled responses.

    Attributes:
        payload: a ``RolloutBatch``, or a reference to one.
        prompt_lengths: ``[B]`` int64.
        response_lengths: ``[B]`` int64.
        own_lengths: ``[B]`` int64, tokens that the policy wrote; the rest of a response is context.
        group_ids: ``[B]`` int64.
        truncated: ``[B]`` bool.
        is_multi_version: ``[B]`` bool, several versions of the weights generated the response.
        policy_version: of the oldest weights that generated them.
    """

    payload: Any
    prompt_lengths: Tensor
    response_lengths: Tensor
    own_lengths: Tensor
    group_ids: Tensor
    truncated: Tensor
    is_multi_version: Tensor
    policy_version: int


class Engine(Protocol):
    """(2) and the sampler's side of (9)."""

    @property
    def num_restarts(self) -> int:
        """Engines that died and were replaced since this process started."""
        ...

    def generate(
        self, prompts: PromptBatch, sampling: SamplingConfig, *, samples_per_prompt: int, seed: int
    ) -> RolloutHandle:
        """Samples responses, prompt-major."""
        ...

    def concatenate(self, rollouts: Sequence[RolloutHandle], rows: Sequence[Sequence[int]]) -> RolloutHandle:
        """The chosen rows of several batches as one; of one policy, unless responses survive a push."""
        ...

    def forget_prefixes(self) -> None:
        """Makes the next generation independent of those before."""
        ...

    def sleep(self, *, keep_weights: bool) -> None:
        """Lets GPU memory go; the weights move to the host or are dropped."""
        ...

    def wake(self, what: Literal["weights", "kv_cache"]) -> None:
        """Takes GPU memory back."""
        ...

    def unattended(self, *, step: int = 0) -> "Engine":
        """The same engines for a thread beside the trainer's: a death raises EngineLostError instead of a restart.

        Args:
            step: that samples with them. Of the requests that wait for a place in an engine, the earliest step's come
                first, after those of who is attended, for whom the trainer waits.
        """
        ...

    def replace_lost(self) -> bool:
        """Restarts what died unattended, which then waits for a push; returns whether there was any."""
        ...

    def abandon(self) -> None:
        """Ends all engines, so that nobody waits for them any more."""
        ...

    def fetch(self, rollouts: RolloutHandle) -> RolloutBatch:
        """The responses themselves, in this process."""
        ...

    def hold(self, rollouts: RolloutBatch) -> RolloutHandle:
        """The inverse of ``fetch``."""
        ...


class RewardStage(Protocol):
    """(3)."""

    def score(self, rollouts: RolloutHandle, prompts: PromptBatch) -> RewardBatch:
        """The outcome reward of every response."""
        ...


class Actor(Protocol):
    """(4) to (8) and the trainer's side of (9): all Megatron ranks together.

    The ranks hold one batch, from scoring until it is released; every stage works on it and returns metrics, merged
    over the ranks that have logits. A stage that is called out of order raises StageOrderError.
    """

    def score_tokens(self, rollouts: RolloutHandle) -> Metrics:
        """Old log-probs and entropies of the policy that generated the responses."""
        ...

    def use_sampler_scores(self, rollouts: RolloutHandle) -> Metrics:
        """The sampler's log-probs and entropies as the old policy's, without a pass."""
        ...

    def assign_credit(self, rewards: RewardBatch) -> Metrics:
        """Shaped rewards and advantages of what was scored last, equal however the responses were sharded."""
        ...

    def update(self, *, step: int) -> Metrics:
        """Optimizer updates from what has got credit."""
        ...

    def sample_records(self, group_ids: Sequence[int]) -> list[TokenRecord]:
        """What the algorithm saw of the chosen groups' tokens, after credit or update."""
        ...

    def release_batch(self) -> None:
        """Lets the batch go that the ranks have held since it was scored; the next scoring does too."""
        ...

    def offload(self) -> None:
        """Gradients and optimizer state leave the GPU."""
        ...

    def onload(self) -> None:
        """They come back."""
        ...

    def begin_save(self, folder: Path, *, in_background: bool) -> None:
        """Every rank takes a snapshot and starts to write its part of a checkpoint."""
        ...

    def is_save_written(self) -> bool:
        """Every rank has written its part, or failed to."""
        ...

    def finish_save(self) -> dict[str, str]:
        """Waits until every rank has written its part; the checksum of every file, by name."""
        ...

    def load(self, folder: Path, *, checksums: Mapping[str, str]) -> None:
        """Every rank restores its part of a checkpoint, after the files have been compared with their checksums."""
        ...


class MemoryTurns(Protocol):
    """Who has the GPU memory, where engines and trainer share it."""

    def to_trainer(self, *, keep_weights: bool = False) -> None:
        """For the start, for scoring and updates, and for a checkpoint, after which the engine needs its weights."""
        ...

    def to_push(self) -> None:
        """For a push."""
        ...

    def to_engine(self) -> None:
        """For sampling; comes after a push or after ``to_trainer(keep_weights=True)`` and ``to_push``."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class StepParts:
    """Everything that a training step talks to.

    Attributes:
        logprob_gap_limit: nats; see ``WeightSyncConfig``.
    """

    engine: Engine
    reward: RewardStage
    actor: Actor
    weight_sync: WeightSync
    turns: MemoryTurns
    timers: StageTimers
    logprob_gap_limit: float


def rollout_summary(batch: RolloutBatch) -> dict[str, Any]:
    """The numbers of a batch that the driver needs: the fields of ``RolloutHandle`` but for the payload."""
    return {
        "prompt_lengths": batch.prompt_lengths,
        "response_lengths": batch.response_lengths,
        "own_lengths": batch.own_lengths,
        "group_ids": batch.group_ids,
        "truncated": batch.truncated,
        "is_multi_version": batch.is_multi_version,
        "policy_version": batch.policy_version,
    }
