"""Groups on the engines over Ray, in short calls.

An engine's process executes one call at a time. A push therefore waits for one slice, not for the responses, and vLLM
is used by one thread only.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from gtpo_megatron.batch import Problem, PromptBatch, RolloutBatch
from gtpo_megatron.config.rollout import SamplingConfig
from gtpo_megatron.orchestration.on_ray.collect import collect_next
from gtpo_megatron.orchestration.on_ray.fleet import EngineFleet
from gtpo_megatron.orchestration.stages.engines import Attempt, SliceEnd
from gtpo_megatron.orchestration.stages.rollouts import received
from gtpo_megatron.rollout.requests import requests_for

if TYPE_CHECKING:
    from gtpo_megatron.rollout.vllm_engine import VllmEngine

SLICE_S = 0.25
"""Seconds of sampling per call, and longest wait of a push besides vLLM's last step. A call costs some milliseconds."""


class RayGroupSampler:
    """The engines of a fleet, for the thread that samples.

    Args:
        fleet: the engines.
        sampling: the distribution.
        samples_per_prompt: responses of a group.
        seed: of the run.
    """

    def __init__(self, fleet: EngineFleet, sampling: SamplingConfig, *, samples_per_prompt: int, seed: int) -> None:
        self._fleet = fleet
        self._sampling = sampling
        self._samples_per_prompt = samples_per_prompt
        self._seed = seed
        self._under_way: dict[int, tuple[Any, Any]] = {}  # by engine its process and the stream of its slice
        self._refused: list[int] = []
        self._holders: dict[int, Any] = {}  # by engine the process that has its groups

    def begin_slice(self, engine: int, begin: Mapping[Attempt, Problem], abort: Sequence[Attempt]) -> None:
        """Starts a slice on an idle engine.

        A push may have found it dead and replaced it between two slices; its groups are lost then, too.
        """
        process = self._fleet.processes([engine])[engine]
        is_replaced = self._holders.setdefault(engine, process) is not process
        if is_replaced or self._fleet.is_without_weights(engine):  # marked before the process is replaced
            self._refused.append(engine)
            del self._holders[engine]
            return
        requests = {
            attempt: requests_for(
                PromptBatch(problems=(problem,), group_ids=(attempt.group,)), self._samples_per_prompt
            )
            for attempt, problem in begin.items()
        }
        aborted, sampling, seed = list(abort), self._sampling, self._seed

        def sample_slice(held: "VllmEngine") -> dict[Hashable, RolloutBatch]:
            for attempt in aborted:
                held.abort(attempt)
            for attempt, group in requests.items():
                held.begin(group, sampling, seed=seed, priority=attempt.group, ticket=attempt)
            return {attempt: held.take(attempt) for attempt in held.advance(limit_s=SLICE_S)}

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
                del self._holders[engine]
                ends.append(SliceEnd(engine=engine, groups={}, is_lost=True))
            elif name in ended:
                _, stream = self._under_way.pop(engine)
                groups = {
                    attempt: replace(handle, engines=torch.full_like(handle.group_ids, engine))
                    for attempt, handle in received(stream).items()
                }
                ends.append(SliceEnd(engine=engine, groups=groups))
        return ends
