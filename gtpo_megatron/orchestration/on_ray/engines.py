"""``stages.engines.Engines`` and ``GroupSampler`` over Ray; a dead engine is replaced."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from gtpo_megatron.batch import Problem, PromptBatch, RolloutBatch
from gtpo_megatron.config.rollout import SamplingConfig
from gtpo_megatron.orchestration.on_ray.collect import collect_next
from gtpo_megatron.orchestration.on_ray.fleet import EngineFleet
from gtpo_megatron.orchestration.stages.engines import Attempt, Engines, GroupSampler, SliceEnd
from gtpo_megatron.orchestration.stages.rollouts import Chunk, RolloutHandle, received
from gtpo_megatron.rollout.requests import requests_for

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from gtpo_megatron.orchestration.on_ray.processes import EngineProcess
    from gtpo_megatron.rollout.vllm_engine import VllmEngine

Result = TypeVar("Result")
Key = TypeVar("Key", bound=Hashable)

SLICE_S = 0.25
"""Seconds of sampling per call, and longest wait of a push besides vLLM's last step. A call costs some milliseconds."""


class RayEngines(Engines):
    """The engines as seen by one thread.

    An engine that dies is restarted with the weights of the others, and its requests are repeated; a response depends
    on its request and its seed only. Only the trainer's thread can push weights: in any other, a death raises
    EngineLostError.

    Args:
        fleet: the engines, shared by all threads.
        push_again: pushes a version to replaced engines; None outside the trainer's thread.
    """

    def __init__(self, fleet: EngineFleet, *, push_again: Callable[[int], None] | None) -> None:
        super().__init__(
            fleet.hosts, workers_per_engine=fleet.workers_per_engine, has_environment=fleet.has_environment
        )
        self._fleet = fleet
        self._push_again = push_again

    def run_on_each(self, stage: str, functions: "Mapping[int, Callable[[VllmEngine], Result]]") -> dict[int, Result]:
        """Calls engines at once, and restarted ones again."""

        def attempt(processes: "dict[int, ActorHandle[EngineProcess]]") -> tuple[dict[int, Result], set[int]]:
            calls = {index: process.run.remote(functions[index]) for index, process in processes.items()}
            return self._fleet.wait(stage, calls)

        return self._until_done(stage, attempt, functions)

    def sample(
        self, functions: "Mapping[int, Callable[[VllmEngine], Mapping[Key, Chunk]]]"
    ) -> dict[int, dict[Key, RolloutHandle]]:
        """Calls engines at once, and restarted ones again; the responses stay in the object store."""

        def attempt(
            processes: "dict[int, ActorHandle[EngineProcess]]",
        ) -> tuple[dict[int, dict[Key, RolloutHandle]], set[int]]:
            streams = {
                index: process.sample.options(num_returns="streaming").remote(functions[index])
                for index, process in processes.items()
            }
            ended, dead = self._fleet.wait("rollout", {index: stream.completed() for index, stream in streams.items()})
            return {index: received(streams[index]) for index in ended}, dead

        return self._until_done("rollout", attempt, functions)

    def store(self, rollouts: RolloutBatch) -> RolloutHandle:
        """Puts responses into the object store; returns their handle."""
        import ray

        return RolloutHandle.of_groups(rollouts, put=ray.put)

    @property
    def num_restarts(self) -> int:
        """Number of engines that died and were replaced."""
        return self._fleet.num_restarts

    def unattended(self) -> "RayEngines":
        """The same engines for another thread than the trainer's."""
        return RayEngines(self._fleet, push_again=None)

    def group_sampler(self, sampling: SamplingConfig, *, samples_per_prompt: int, seed: int) -> GroupSampler:
        """The engines for the thread of a continuous run."""
        return RayGroupSampler(self._fleet, sampling, samples_per_prompt=samples_per_prompt, seed=seed)

    def replace_lost(self) -> bool:
        """Restarts engines that other threads reported as lost; True if there were any. They need a push."""
        return self._fleet.replace_lost()

    def abandon(self) -> None:
        """Kills all engines."""
        self._fleet.abandon()

    def _until_done(
        self,
        stage: str,
        attempt: "Callable[[dict[int, ActorHandle[EngineProcess]]], tuple[dict[int, Result], set[int]]]",
        functions: Mapping[int, Any],
    ) -> dict[int, Result]:
        """Repeats the attempt until all engines are done; dead engines are replaced, or reported as lost.

        Args:
            stage: name of the stage, for messages.
            attempt: calls processes, by index; returns the results of some, and the indices of dead ones.
            functions: function of each engine, by its index.
        """
        left = list(functions)
        results: dict[int, Result] = {}
        while left:
            called = self._fleet.processes(left)
            if self._push_again is None and stage == "rollout":
                self._fleet.refuse_without_weights(left)
            found, dead = attempt(called)
            results |= found
            left = sorted(dead)
            if left:
                if self._push_again is None:
                    self._fleet.report_lost({index: called[index] for index in left}, stage)
                self._fleet.replace(left, stage)
                self._push_again(self._fleet.version)
        return results


class RayGroupSampler:
    """The engines of a fleet, for the thread that samples group by group, in short calls.

    An engine's process executes one call at a time. A push therefore waits for one slice, not for the responses, and
    vLLM is used by one thread only.

    Args:
        fleet: the engines.
        sampling: the distribution.
        samples_per_prompt: responses of a group.
        seed: seed of the run.
    """

    def __init__(self, fleet: EngineFleet, sampling: SamplingConfig, *, samples_per_prompt: int, seed: int) -> None:
        self._fleet = fleet
        self._sampling = sampling
        self._samples_per_prompt = samples_per_prompt
        self._seed = seed
        self._under_way: dict[int, tuple[ActorHandle[EngineProcess], Any]] = {}  # process, stream of its slice
        self._refused: list[int] = []
        self._processes: dict[int, ActorHandle[EngineProcess]] = {}  # by engine: the one that has its groups

    def begin_slice(self, engine: int, begin: Mapping[Attempt, Problem], abort: Sequence[Attempt]) -> None:
        """Starts a slice on an idle engine.

        A push may have found it dead and replaced it between two slices; its groups are lost then, too.
        """
        process = self._fleet.processes([engine])[engine]
        is_replaced = self._processes.setdefault(engine, process) is not process
        if is_replaced or self._fleet.is_without_weights(engine):  # marked before the process is replaced
            self._refused.append(engine)
            del self._processes[engine]
            return
        requests = {
            attempt: requests_for(
                PromptBatch(problems=(problem,), group_ids=(attempt.group,)),
                self._samples_per_prompt,
                with_problems=self._fleet.has_environment,
            )
            for attempt, problem in begin.items()
        }
        aborted, sampling, seed = list(abort), self._sampling, self._seed

        def sample_slice(vllm: "VllmEngine") -> dict[Hashable, Chunk]:
            for attempt in aborted:
                vllm.abort(attempt)
            for attempt, group in requests.items():
                vllm.begin(group, sampling, seed=seed, priority=attempt.group, ticket=attempt)
            # a chunk of its own for each: groups are graded, taken and dropped one by one
            return {attempt: (vllm.take(attempt),) for attempt in vllm.advance(limit_s=SLICE_S)}

        call = process.sample.options(num_returns="streaming")
        self._under_way[engine] = (process, call.remote(sample_slice))

    def ended_slices(self) -> list[SliceEnd]:
        """Waits until at least one slice has ended; dead engines are reported to the fleet."""
        if self._refused:
            refused, self._refused = self._refused, []
            return [SliceEnd(engine=engine, groups={}, is_lost=True) for engine in refused]
        name_of = {engine: self._fleet.names[engine] for engine in self._under_way}
        ended, dead = collect_next(
            {name_of[engine]: stream.completed() for engine, (_, stream) in self._under_way.items()},
            stage="rollout",
            deadline_s=self._fleet.deadline_s,
        )
        ends = []
        for engine, name in name_of.items():
            if name in dead:
                process, _ = self._under_way.pop(engine)
                self._fleet.note_lost({engine: process})
                del self._processes[engine]
                ends.append(SliceEnd(engine=engine, groups={}, is_lost=True))
            elif name in ended:
                _, stream = self._under_way.pop(engine)
                groups = {
                    attempt: replace(handle, engines=torch.full_like(handle.group_ids, engine))
                    for attempt, handle in received(stream).items()
                }
                ends.append(SliceEnd(engine=engine, groups=groups))
        return ends
