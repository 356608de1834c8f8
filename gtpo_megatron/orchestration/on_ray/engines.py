"""All rollout engines over Ray as one sampler: requests are dealt, an engine that dies is replaced and asked again."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

from gtpo_megatron.batch import PromptBatch, RolloutBatch
from gtpo_megatron.config.rollout import SamplingConfig
from gtpo_megatron.orchestration.on_ray.fleet import Answers, Call, EngineFleet
from gtpo_megatron.orchestration.on_ray.rollouts import (
    RolloutParts,
    chosen_rows,
    joined,
    received,
    summary_and_pieces,
)
from gtpo_megatron.orchestration.on_ray.slices import sample_in_slices
from gtpo_megatron.orchestration.stages.protocols import RolloutHandle
from gtpo_megatron.rollout.requests import deal_to_engines, requests_for

_Attempt = Callable[[dict[int, Any]], tuple[Answers, set[int]]]
"""Asks processes, by index; returns the answers of some, and the indices of those that died."""


class RayEngines:
    """One thread's view of the engines.

    An engine that dies is started again, gets the weights that the others have, and is asked again for what it was
    asked when it died; a response depends on its request and its seed, so nothing is lost but time. Only the trainer's
    thread can give it weights: in any other, a death raises EngineLostError.

    Responses that survive a push (``max_spread``) are sampled in slices, between which the push gets in.

    Args:
        fleet: the engines, the same for all views.
        push_again: pushes the version that it is given; None: in a thread beside the trainer's.
        max_spread: versions of the weights that may meet in one batch; 0: a push comes only when nothing is in flight.
        step: that samples with them; of requests that wait for a place in an engine, the earliest step's come first.
    """

    def __init__(
        self, fleet: EngineFleet, *, push_again: Callable[[int], None] | None, max_spread: int = 0, step: int = 0
    ) -> None:
        self._fleet = fleet
        self._push_again = push_again
        self._max_spread = max_spread
        self._step = step

    @property
    def num_restarts(self) -> int:
        """Engines that died and were replaced."""
        return self._fleet.num_restarts

    def unattended(self, *, step: int = 0) -> "RayEngines":
        """The same engines for a thread beside the trainer's."""
        return RayEngines(self._fleet, push_again=None, max_spread=self._max_spread, step=step)

    def generate(
        self, prompts: PromptBatch, sampling: SamplingConfig, *, samples_per_prompt: int, seed: int
    ) -> RolloutHandle:
        """The responses stay in the object store; their lengths come back."""
        requests = requests_for(prompts, samples_per_prompt)
        dealt = deal_to_engines(
            requests, max_response_tokens=sampling.max_response_tokens, loads=[0] * len(self._fleet)
        )
        shares = [[row for row, engine in enumerate(dealt) if engine == index] for index in range(len(self._fleet))]
        busy = [index for index, share in enumerate(shares) if share]

        def ask(index: int, process: Any) -> tuple[Any, Any]:
            share = [requests[row] for row in shares[index]]
            stream = process.generate.options(num_returns="streaming").remote(share, sampling, seed)
            return stream, stream.completed()

        def at_once(processes: dict[int, Any]) -> tuple[Answers, set[int]]:
            answers, dead = self._fleet.attempt("rollout", ask, processes)
            return {index: received(stream) for index, ((stream, _), _) in answers.items()}, dead

        def in_slices(processes: dict[int, Any]) -> tuple[Answers, set[int]]:
            index_of = {self._fleet.names[index]: index for index in processes}
            answers, dead = sample_in_slices(
                {self._fleet.names[index]: process for index, process in processes.items()},
                {self._fleet.names[index]: [requests[row] for row in shares[index]] for index in processes},
                sampling,
                seed,
                priority=self._step,
                deadline_s=self._fleet.deadline_s,
            )
            return {index_of[name]: answer for name, answer in answers.items()}, {index_of[name] for name in dead}

        answers = self._until_answered("rollout", in_slices if self._max_spread else at_once, busy)
        rows = [(0, 0)] * len(requests)
        for place, index in enumerate(busy):
            for row_there, row in enumerate(shares[index]):
                rows[row] = (place, row_there)
        return joined([answers[index] for index in busy], rows, max_spread=self._max_spread)

    def concatenate(self, rollouts: Sequence[RolloutHandle], rows: Sequence[Sequence[int]]) -> RolloutHandle:
        """The chosen rows as one batch, which stays where it is."""
        return chosen_rows(rollouts, rows, max_spread=self._max_spread)

    def forget_prefixes(self) -> None:
        """Empties the prefix caches."""
        self._ask("rollout", lambda _, process: (process.forget_prefixes.remote(),))

    def sleep(self, *, keep_weights: bool) -> None:
        """All engines, and none before all are seen to live: a replacement's weights would be pushed to sleepers."""
        self._ask("memory", lambda _, process: (process.identity.remote(),))
        self._ask("memory", lambda _, process: (process.sleep.remote(keep_weights),))

    def wake(self, what: Literal["weights", "kv_cache"]) -> None:
        """All engines."""
        self._ask("memory", lambda _, process: (process.wake.remote(what),))

    def replace_lost(self) -> bool:
        """Restarts what another view has reported as lost, which then waits for a push; whether there was any."""
        return self._fleet.replace_lost()

    def abandon(self) -> None:
        """Kills all engines."""
        self._fleet.abandon()

    def fetch(self, rollouts: RolloutHandle) -> RolloutBatch:
        """The responses, in this process."""
        parts: RolloutParts = rollouts.payload
        return parts.gather()

    def hold(self, rollouts: RolloutBatch) -> RolloutHandle:
        """Puts responses into the object store."""
        import ray

        summary, *pieces = summary_and_pieces(rollouts)
        rows = [(0, row) for row in range(rollouts.num_responses)]
        return joined([([ray.put(piece) for piece in pieces], summary)], rows)

    def _ask(self, stage: str, call: Call) -> None:
        """Calls all engines at once, and those that die meanwhile again after their restart."""
        self._until_answered(stage, functools.partial(self._fleet.attempt, stage, call), range(len(self._fleet)))

    def _until_answered(self, stage: str, attempt: _Attempt, engines: Sequence[int]) -> Answers:
        """Attempts until all have answered; who dies meanwhile is replaced, or reported beside the trainer's thread.

        Args:
            stage: for messages.
            attempt: to ask some.
            engines: indices.
        """
        left = list(engines)
        answers: Answers = {}
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
