"""All rollout engines over Ray as one sampler: requests are distributed, a dead engine is replaced."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from gtpo_megatron.batch import PromptBatch, RolloutBatch
from gtpo_megatron.config.rollout import SamplingConfig
from gtpo_megatron.orchestration.on_ray.fleet import Call, EngineFleet
from gtpo_megatron.orchestration.on_ray.group_slices import RayGroupSampler
from gtpo_megatron.orchestration.stages.rollouts import RolloutHandle, joined, received
from gtpo_megatron.rollout.requests import assign_to_engines, requests_for

_Attempt = Callable[[dict[int, Any]], tuple[dict[int, Any], set[int]]]
"""Calls processes, by index; returns the answers of some, and the indices of dead ones."""


class RayEngines:
    """The engines as seen by one thread.

    An engine that dies is restarted with the weights of the others, and its requests are repeated; a response depends
    on its request and its seed only. Only the trainer's thread can push weights: in any other, a death raises
    EngineLostError.

    Args:
        fleet: the engines, shared by all threads.
        push_again: pushes a version to replaced engines; None outside the trainer's thread.
    """

    def __init__(self, fleet: EngineFleet, *, push_again: Callable[[int], None] | None) -> None:
        self._fleet = fleet
        self._push_again = push_again

    @property
    def num_restarts(self) -> int:
        """Number of engines that died and were replaced."""
        return self._fleet.num_restarts

    def unattended(self) -> "RayEngines":
        """The same engines for another thread than the trainer's."""
        return RayEngines(self._fleet, push_again=None)

    def group_sampler(self, sampling: SamplingConfig, *, samples_per_prompt: int, seed: int) -> RayGroupSampler:
        """The engines for the thread of a continuous run."""
        return RayGroupSampler(self._fleet, sampling, samples_per_prompt=samples_per_prompt, seed=seed)

    def generate(
        self, prompts: PromptBatch, sampling: SamplingConfig, *, samples_per_prompt: int, seed: int
    ) -> RolloutHandle:
        """Samples responses; they stay in the object store, and the handle has their lengths."""
        requests = requests_for(prompts, samples_per_prompt)
        dealt = assign_to_engines(
            requests, max_response_tokens=sampling.max_response_tokens, loads=[0] * len(self._fleet)
        )
        shares = [[row for row, engine in enumerate(dealt) if engine == index] for index in range(len(self._fleet))]
        busy = [index for index, share in enumerate(shares) if share]

        def ask(index: int, process: Any) -> tuple[Any, Any]:
            share = [requests[row] for row in shares[index]]
            stream = process.generate.options(num_returns="streaming").remote(share, sampling, seed)
            return stream, stream.completed()

        def at_once(processes: dict[int, Any]) -> tuple[dict[int, Any], set[int]]:
            answers, dead = self._fleet.attempt("rollout", ask, processes)
            return {index: received(stream) for index, ((stream, _), _) in answers.items()}, dead

        answers = self._until_answered("rollout", at_once, busy)
        everyone = joined([handle for index in busy for handle in answers[index].values()])
        order = torch.tensor([row for index in busy for row in shares[index]])  # the request of each response
        return replace(everyone.select(order.argsort().tolist()), engines=torch.tensor(dealt, dtype=torch.int64))

    def forget_prefixes(self) -> None:
        """Empties the prefix caches."""
        self._ask("rollout", lambda _, process: (process.forget_prefixes.remote(),))

    def sleep(self, *, keep_weights: bool) -> None:
        """Releases GPU memory of all engines, after all have answered: weights cannot be pushed to sleeping ones."""
        self._ask("memory", lambda _, process: (process.identity.remote(),))
        self._ask("memory", lambda _, process: (process.sleep.remote(keep_weights),))

    def wake(self, what: Literal["weights", "kv_cache"]) -> None:
        """Allocates GPU memory of all engines again."""
        self._ask("memory", lambda _, process: (process.wake.remote(what),))

    def replace_lost(self) -> bool:
        """Restarts engines that other threads reported as lost; True if there were any. They need a push."""
        return self._fleet.replace_lost()

    def abandon(self) -> None:
        """Kills all engines."""
        self._fleet.abandon()

    def hold(self, rollouts: RolloutBatch) -> RolloutHandle:
        """Puts responses into the object store; returns their handle."""
        import ray

        return RolloutHandle.of_groups(rollouts, put=ray.put)

    def _ask(self, stage: str, call: Call) -> None:
        """Calls all engines at once, and restarted ones again."""
        self._until_answered(stage, functools.partial(self._fleet.attempt, stage, call), range(len(self._fleet)))

    def _until_answered(self, stage: str, attempt: _Attempt, engines: Sequence[int]) -> dict[int, Any]:
        """Repeats the attempt until all have answered; dead engines are replaced, or reported as lost.

        Args:
            stage: for messages.
            attempt: calls some engines.
            engines: indices of the engines.
        """
        left = list(engines)
        answers: dict[int, Any] = {}
        while left:
            asked = self._fleet.processes(left)
            if self._push_again is None and stage == "rollout":
                self._fleet.refuse_without_weights(left)
            found, dead = attempt(asked)
            answers |= found
            left = sorted(dead)
            if left:
                if self._push_again is None:
                    self._fleet.report_lost({index: asked[index] for index in left}, stage)
                self._fleet.replace(left, stage)
                self._push_again(self._fleet.version)
        return answers
