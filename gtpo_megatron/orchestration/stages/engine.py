"""(2) The engines as the loop sees them, over Ray (``on_ray/engines.py``) or in this process (``in_process.py``)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from gtpo_megatron.batch import Problem, PromptBatch, RolloutBatch
from gtpo_megatron.config.rollout import SamplingConfig
from gtpo_megatron.orchestration.stages.rollouts import RolloutHandle


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
