"""All rollout engines over Ray as one sampler: requests are dealt, an engine that dies is replaced."""

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal

from gtpo_megatron.batch import PromptBatch, RolloutBatch
from gtpo_megatron.config.rollout import SamplingConfig
from gtpo_megatron.errors import EngineLostError, WorkerError
from gtpo_megatron.orchestration.collect import collect_survivors
from gtpo_megatron.orchestration.parts import RolloutHandle
from gtpo_megatron.orchestration.ray_slices import sample_in_slices
from gtpo_megatron.orchestration.rollout_parts import RolloutParts, chosen_rows, joined, received, summary_and_pieces
from gtpo_megatron.rollout.requests import deal_to_engines, requests_for
from gtpo_megatron.weights.link import WeightLink
from gtpo_megatron.weights.transports.shared_memory import SharedSlots, SlotShape

logger = logging.getLogger(__name__)

_Answers = dict[int, tuple[tuple[Any, ...], Any]]
"""By index of the engine: the references that its call gave, and what the last of them refers to."""

_Attempt = Callable[[dict[int, Any]], tuple[_Answers, set[int]]]
"""Asks processes, by index; returns the answers of some, and the indices of those that died."""


def engine_names(num_engines: int) -> list[str]:
    """How messages call the engines."""
    return [f"rollout engine {index}" for index in range(num_engines)] if num_engines > 1 else ["rollout engine"]


class RayEngines:
    """Several vLLM engines, each in a process of its own.

    An engine that dies is started again, gets the weights that the others have, and is asked again for what it was
    asked when it died; a response depends on its request and its seed, so nothing is lost but time.

    Responses that survive a push (``max_spread``) are sampled in slices, between which the push gets in.

    Args:
        processes: remote ``EngineProcess`` objects; a replacement takes its predecessor's place in it.
        hosts: the machine of each.
        workers_per_engine: its tensor parallel size.
        restart: starts the engine with this index anew and waits until it is up.
        max_restarts: in the whole run; the next death ends it.
        deadline_s: longest time for one call.
        max_spread: versions of the weights that may meet in one batch; 0: a push comes only when nothing is in flight.
        expect_end: told the name of an engine that is about to be killed on purpose.

    Attributes:
        num_restarts: so far.
        open_link: opens a fresh link from the trainer's weights to all engines; set when there is a trainer.
        push_again: pushes the version that it is given.
    """

    def __init__(
        self,
        processes: list[Any],
        *,
        hosts: Sequence[str],
        workers_per_engine: int,
        restart: Callable[[int], Any],
        max_restarts: int,
        deadline_s: float,
        max_spread: int = 0,
        expect_end: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._processes = processes
        self._hosts = list(hosts)
        self._workers_per_engine = workers_per_engine
        self._names = engine_names(len(processes))
        self._restart_one = restart
        self._max_restarts = max_restarts
        self._deadline_s = deadline_s
        self._version = 0
        self._is_attended = True
        self._step = 0
        self._max_spread = max_spread
        self._expect_end = expect_end
        # by index the process that died: the one that has taken its place since is not lost
        self._lost: dict[int, Any] = {}
        self._without_weights: set[int] = set()
        self.num_restarts = 0
        self.open_link: Callable[[RayEngines], None] = _nobody_there
        self.push_again: Callable[[int], None] = _nobody_there

    def generate(
        self, prompts: PromptBatch, sampling: SamplingConfig, *, samples_per_prompt: int, seed: int
    ) -> RolloutHandle:
        """The responses stay in the object store; their lengths come back."""
        requests = requests_for(prompts, samples_per_prompt)
        dealt = deal_to_engines(
            requests, max_response_tokens=sampling.max_response_tokens, loads=[0] * len(self._processes)
        )
        shares = [[row for row, engine in enumerate(dealt) if engine == index] for index in range(len(self._processes))]
        busy = [index for index, share in enumerate(shares) if share]

        def whole(index: int, process: Any) -> tuple[Any, Any]:
            share = [requests[row] for row in shares[index]]
            stream = process.generate.options(num_returns="streaming").remote(share, sampling, seed)
            return stream, stream.completed()

        def in_slices(processes: dict[int, Any]) -> tuple[_Answers, set[int]]:
            index_of = {self._names[index]: index for index in processes}
            answers, dead = sample_in_slices(
                {self._names[index]: process for index, process in processes.items()},
                {self._names[index]: [requests[row] for row in shares[index]] for index in processes},
                sampling,
                seed,
                priority=self._step,
                deadline_s=self._deadline_s,
            )
            found = {index_of[name]: ((stream,), None) for name, stream in answers.items()}
            return found, {index_of[name] for name in dead}

        answers = self._insist("rollout", in_slices, busy) if self._max_spread else self._ask("rollout", whole, busy)
        rows = [(0, 0)] * len(requests)
        for place, index in enumerate(busy):
            for row_there, row in enumerate(shares[index]):
                rows[row] = (place, row_there)
        return joined([received(answers[index][0][0]) for index in busy], rows, max_spread=self._max_spread)

    def concatenate(self, rollouts: Sequence[RolloutHandle], rows: Sequence[Sequence[int]]) -> RolloutHandle:
        """The chosen rows as one batch, which stays where it is."""
        return chosen_rows(rollouts, rows, max_spread=self._max_spread)

    def hosts(self) -> list[str]:
        """The machine of every engine."""
        return list(self._hosts)

    def open_slots(self, shape: SlotShape) -> dict[int, SharedSlots]:
        """Shared memory for every worker, on its engine's machine."""
        answers = self._ask(
            "weight_sync",
            lambda index, process: (process.open_slots.remote(self._workers(index), shape),),
        )
        return {worker: slots for _, found in answers.values() for worker, slots in found.items()}

    def remove_slot_names(self) -> None:
        """Both sides have mapped the slots."""
        self._ask("weight_sync", lambda _, process: (process.remove_slot_names.remote(),))

    def connect_weights(self, link: WeightLink) -> None:
        """Every worker opens its end."""
        self._ask("weight_sync", lambda index, process: (process.connect_weights.remote(link, self._workers(index)),))

    def reconnect(self) -> None:
        """Lets the trainer's weights reach all engines.

        Where one dies meanwhile the link is opened anew, to its successor too: all ends must be of one opening.

        Raises:
            WorkerError: more died than ``max_restarts``.
        """
        while True:
            try:
                self.open_link(self.unattended())
            except EngineLostError:
                self._restart_lost("weight_sync")
            else:
                return

    def receiving(self, version: int, *, with_checksums: bool) -> dict[str, Any]:
        """Starts the samplers' side of a push: name -> call."""
        self._version = version
        return {
            name: process.receive_weights.remote(version, with_checksums)
            for name, process in zip(self._names, self._processes, strict=True)
        }

    def mark_received(self) -> None:
        """A push has reached all engines."""
        self._without_weights.clear()

    def replace_dead(self) -> None:
        """Looks whether all engines live, so that a push does not wait for one that does not."""
        _, dead = collect_survivors(
            {name: process.identity.remote() for name, process in zip(self._names, self._processes, strict=True)},
            stage="weight_sync",
            deadline_s=self._deadline_s,
        )
        self._lost |= {index: self._processes[index] for index, name in enumerate(self._names) if name in dead}
        if self._restart_lost("weight_sync"):
            self.reconnect()

    def _workers(self, index: int) -> range:
        """Numbers of an engine's workers among all."""
        return range(index * self._workers_per_engine, (index + 1) * self._workers_per_engine)

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

    def unattended(self, *, step: int = 0) -> "RayEngines":
        """The same engines; a death is only reported. Requests for an earlier step go before those for a later one."""
        twin = copy.copy(self)
        twin._is_attended = False
        twin._step = step
        return twin

    def replace_lost(self) -> bool:
        """Starts those anew that have died unattended, and lets the trainer reach them."""
        is_any_lost = self._restart_lost("rollout")
        if is_any_lost:
            self.reconnect()
        return is_any_lost

    def _restart_lost(self, stage: str) -> bool:
        reported = dict(self._lost)
        lost = sorted(index for index, process in reported.items() if self._processes[index] is process)
        if lost:
            self._restart(lost, stage)
        for index, process in reported.items():
            if self._lost[index] is process:
                del self._lost[index]
        return bool(lost)

    def abandon(self) -> None:
        """Kills all engines."""
        import ray

        for name, process in zip(self._names, self._processes, strict=True):
            self._expect_end(name)
            ray.kill(process)

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

    def _ask(
        self, stage: str, call: Callable[[int, Any], tuple[Any, ...]], engines: Sequence[int] | None = None
    ) -> _Answers:
        """Calls some engines at once, and those that die meanwhile again after their restart.

        Args:
            stage: for messages.
            call: makes references of one engine's call; the last of them is waited for.
            engines: indices; None: all.

        Returns:
            By index: the references, and what the last one refers to.
        """

        def attempt(processes: dict[int, Any]) -> tuple[_Answers, set[int]]:
            references = {index: call(index, process) for index, process in processes.items()}
            values, dead = collect_survivors(
                {self._names[index]: found[-1] for index, found in references.items()},
                stage=stage,
                deadline_s=self._deadline_s,
            )
            answers = {
                index: (found, values[self._names[index]])
                for index, found in references.items()
                if self._names[index] in values
            }
            return answers, {index for index in processes if self._names[index] in dead}

        return self._insist(stage, attempt, range(len(self._processes)) if engines is None else engines)

    def _insist(self, stage: str, attempt: _Attempt, engines: Sequence[int]) -> _Answers:
        """Attempts until all have answered; who dies meanwhile is restarted, or reported where nobody attends.

        Args:
            stage: for messages.
            attempt: to ask some.
            engines: indices.
        """
        left = list(engines)
        answers: _Answers = {}
        while left:
            asked = {index: self._processes[index] for index in left}
            if not self._is_attended:
                self._refuse_without_weights(stage, left)
            found, dead = attempt(asked)
            answers |= found
            left = sorted(dead)
            if left and not self._is_attended:
                self._lost |= {index: asked[index] for index in left}
                raise EngineLostError(f"{', '.join(self._names[index] for index in left)} died in {stage}")
            if left:
                self._restart(left, stage)
                self.reconnect()
                self.push_again(self._version)
        return answers

    def _refuse_without_weights(self, stage: str, engines: Sequence[int]) -> None:
        """Who samples unattended may meet an engine that was replaced meanwhile and waits for the push to come."""
        waiting = sorted(self._without_weights.intersection(engines))
        if stage == "rollout" and waiting:
            names = ", ".join(self._names[index] for index in waiting)
            raise EngineLostError(f"{names} died, and the successor has no weights yet")

    def _restart(self, engines: Sequence[int], stage: str) -> None:
        import ray

        names = ", ".join(self._names[index] for index in engines)
        if self.num_restarts + len(engines) > self._max_restarts:
            raise WorkerError(
                f"{names} died in {stage}, after {self.num_restarts} restarts in this run "
                f"(rollout.max_engine_restarts={self._max_restarts}); see log.txt, and the system log for an "
                f"out-of-memory kill"
            )
        self.num_restarts += len(engines)
        logger.warning(
            "%s died in %s and will be replaced (%d of at most %d replacements in this run); then it is asked again",
            names,
            stage,
            self.num_restarts,
            self._max_restarts,
        )
        self._without_weights |= set(engines)  # first, for whoever samples beside
        for index in engines:
            self._expect_end(self._names[index])
            ray.kill(self._processes[index])  # it may only be out of reach, and still hold its GPUs
            self._processes[index] = self._restart_one(index)


def _nobody_there(*_: Any) -> None:
    raise WorkerError("an engine died before the first weights were pushed; see log.txt")
