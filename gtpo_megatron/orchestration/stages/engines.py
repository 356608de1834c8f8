"""(2) The engines, and their end of (9): what each stage asks of all of them, and how their results become one.

What is asked is a function of ``VllmEngine``. :class:`Engines` is written once; two subclasses of a few methods call it
over Ray (``on_ray/engines.py``) or in this process (``in_process.py``).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

import torch

from gtpo_megatron.batch import Problem, PromptBatch, RolloutBatch
from gtpo_megatron.config.rollout import SamplingConfig
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.orchestration.stages.rollouts import Chunk, RolloutHandle, in_chunks, joined
from gtpo_megatron.rollout.requests import assign_to_engines, requests_for

if TYPE_CHECKING:
    from gtpo_megatron.rollout.vllm_engine import VllmEngine
    from gtpo_megatron.weights.push.link import SharedSlots, SlotShape, WeightLink

Result = TypeVar("Result")
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, order=True, slots=True)
class Attempt:
    """One try to sample a group; the results of a try that was given up are ignored.

    Attributes:
        group: label of the group.
        number: number of the try, from 0.
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


class Engines(ABC):
    """All engines, as one thread sees them.

    Args:
        hosts: the host of every worker, engine after engine.
        workers_per_engine: workers of an engine.
        has_environment: requests need their problems.
    """

    def __init__(self, hosts: Sequence[str], *, workers_per_engine: int, has_environment: bool = False) -> None:
        self.hosts = tuple(hosts)
        self.num_engines = len(self.hosts) // workers_per_engine
        self._workers_per_engine = workers_per_engine
        self._has_environment = has_environment

    # --------------------------------------------------------------------------------------------- calling the engines
    @abstractmethod
    def run_on_each(self, stage: str, functions: "Mapping[int, Callable[[VllmEngine], Result]]") -> dict[int, Result]:
        """Calls a function on each of some engines, all of them at once; returns their results.

        Args:
            stage: name of the stage, for messages.
            functions: function of each engine, by its index.

        Raises:
            EngineLostError: an engine died and this thread does not replace it; see ``unattended``.
            WorkerError: too many engines died, or one raised or has not answered in time; the message names it.
            GTPOError: the error that an engine raised.
        """

    @abstractmethod
    def sample(
        self, functions: "Mapping[int, Callable[[VllmEngine], Mapping[Key, Chunk]]]"
    ) -> dict[int, dict[Key, RolloutHandle]]:
        """As ``run_on_each``, of functions that sample: responses stay where they are, their handles are returned."""

    @abstractmethod
    def store(self, rollouts: RolloutBatch) -> RolloutHandle:
        """Stores responses of this process; returns their handle. The inverse of ``RolloutHandle.fetch``."""

    # ------------------------------------------------------------------------------- deaths; here, of none that can die
    @property
    def num_restarts(self) -> int:
        """Number of engines that died and were replaced since this process started."""
        return 0

    def unattended(self) -> "Engines":
        """The same engines for another thread, in which a death raises EngineLostError instead of a restart."""
        return self

    def replace_lost(self) -> bool:
        """Restarts engines that other threads reported as lost; returns whether there were any. They need a push."""
        return False

    def abandon(self) -> None:  # noqa: B027 - an engine in this process ends with it
        """Ends all engines, and so all calls that wait for them."""

    # -------------------------------------------------------------------------------------------------------- sampling
    def generate(
        self, prompts: PromptBatch, sampling: SamplingConfig, *, samples_per_prompt: int, seed: int
    ) -> RolloutHandle:
        """Samples responses, prompt-major."""
        requests = requests_for(prompts, samples_per_prompt, with_problems=self._has_environment)
        dealt = assign_to_engines(
            requests, max_response_tokens=sampling.max_response_tokens, loads=[0] * self.num_engines
        )
        parts = {engine: [row for row, other in enumerate(dealt) if other == engine] for engine in sorted(set(dealt))}

        def generate(rows: Sequence[int]) -> "Callable[[VllmEngine], dict[int, Chunk]]":
            part = [requests[row] for row in rows]
            return lambda engine: dict(enumerate(in_chunks(engine.generate(part, sampling, seed=seed))))

        found = self.sample({engine: generate(rows) for engine, rows in parts.items()})
        everyone = joined([handle for engine in parts for handle in found[engine].values()])
        order = torch.tensor([row for rows in parts.values() for row in rows])  # the request of each response
        return replace(everyone.select(order.argsort().tolist()), engines=torch.tensor(dealt, dtype=torch.int64))

    def group_sampler(self, sampling: SamplingConfig, *, samples_per_prompt: int, seed: int) -> GroupSampler:
        """The engines for the thread of a continuous run.

        Raises:
            ConfigError: an engine in the trainer's process is not paused for a push.
        """
        del sampling, samples_per_prompt, seed
        raise ConfigError("cluster.mode='local' samples the groups of a step together; use mode='ray'")

    def forget_prefixes(self) -> None:
        """Empties the prefix caches, so that the next generation does not depend on earlier ones."""
        self._all("rollout", lambda engine: engine.forget_prefixes())

    # ---------------------------------------------------------------------------------------------------------- memory
    def sleep(self, *, keep_weights: bool) -> None:
        """Releases GPU memory; the weights move to the host or are dropped."""
        self._all("memory", lambda _: None)  # dead ones are replaced first: weights cannot be pushed to sleeping ones
        self._all("memory", lambda engine: engine.sleep(keep_weights=keep_weights))

    def wake(self, what: Literal["weights", "kv_cache"]) -> None:
        """Allocates GPU memory again."""
        self._all("memory", lambda engine: engine.wake(what))

    # ---------------------------------------------------- the engines' end of a push; who opens it calls ``unattended``
    def open_slots(self, shape: "SlotShape") -> "dict[int, SharedSlots]":
        """Opens shared memory for every worker, on its host."""

        def opened(workers: range) -> "Callable[[VllmEngine], dict[int, SharedSlots]]":
            return lambda engine: engine.weights.open_slots(workers, shape)

        found = self.run_on_each("weight_sync", {index: opened(workers) for index, workers in self._workers().items()})
        return {worker: slots for opened_here in found.values() for worker, slots in opened_here.items()}

    def connect_weights(self, link: "WeightLink") -> None:
        """Opens the transport in every worker."""

        def connect(workers: range) -> "Callable[[VllmEngine], None]":
            return lambda engine: engine.weights.connect(link, workers)

        self.run_on_each("weight_sync", {index: connect(workers) for index, workers in self._workers().items()})

    def remove_slot_names(self) -> None:
        """Removes the slots' names, after both sides have mapped them: the memory is freed with the processes."""
        self._all("weight_sync", lambda engine: engine.weights.remove_slot_names())

    def _workers(self) -> dict[int, range]:
        """By engine the indices of its workers among all workers."""
        size = self._workers_per_engine
        return {index: range(index * size, (index + 1) * size) for index in range(self.num_engines)}

    def _all(self, stage: str, function: "Callable[[VllmEngine], None]") -> None:
        self.run_on_each(stage, dict.fromkeys(range(self.num_engines), function))
