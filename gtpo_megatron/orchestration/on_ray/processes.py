"""The processes of a run as Ray actors, thin wrappers of the classes that ``in_process`` uses."""

import functools
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from gtpo_megatron.actor.coordinates import RankCoordinates
from gtpo_megatron.batch import PromptBatch, RewardBatch, RolloutBatch
from gtpo_megatron.config.rollout import SamplingConfig
from gtpo_megatron.config.serialize import from_plain
from gtpo_megatron.distributed.rendezvous import Rendezvous
from gtpo_megatron.observability.logs import rank_prefix, set_up_logs
from gtpo_megatron.orchestration.stages.engine import Attempt
from gtpo_megatron.orchestration.stages.rollouts import (
    RolloutHandle,
    handles_then_groups,
    split_by_group,
)
from gtpo_megatron.rollout.requests import SampleRequest
from gtpo_megatron.weights.push.link import WeightLink
from gtpo_megatron.weights.push.sender import Checksums
from gtpo_megatron.weights.push.transports.shared_memory import SharedSlots, SlotShape

logger = logging.getLogger(__name__)

Call = TypeVar("Call", bound=Callable[..., Any])


class _Process:
    """Base of the run's processes: sets up logs and module path.

    Args:
        config: of the run, as ``to_plain`` made it.
        run_folder: for ``log.txt``.
        prefix: of its log lines.
        search_path: put first on the module path, as in the driver, so that the user's modules are found.
    """

    def __init__(self, config: dict[str, Any], run_folder: str, prefix: str, search_path: str) -> None:
        if search_path not in sys.path:
            sys.path.insert(0, search_path)
        self._config = from_plain(config, "the configuration of the run")
        self._run_folder = Path(run_folder)
        self._set_up_logs(prefix)

    def _set_up_logs(self, prefix: str) -> None:
        set_up_logs(level=self._config.logging.log_level, run_folder=self._run_folder, prefix=prefix)

    def identity(self) -> tuple[str, int]:
        """Host name and process id."""
        return socket.gethostname(), os.getpid()

    def answer(self, question: Callable[..., Any], *arguments: Any) -> Any:
        """Calls ``question`` with what this process holds (None before it has started) and the arguments."""
        return question(self._held(), *arguments)

    def _held(self) -> Any:
        return None


class RankProcess(_Process):
    """A Megatron rank."""

    def __init__(self, config: dict[str, Any], run_folder: str, search_path: str, *, global_rank: int) -> None:
        super().__init__(config, run_folder, rank_prefix(global_rank), search_path)
        self._global_rank = global_rank
        self._actor: Any = None
        self._rendezvous: Rendezvous | None = None

    def rendezvous(self) -> str:
        """Opens a rendezvous on this node, with this process as rank 0; returns its ``init_method``."""
        import ray

        self._rendezvous = Rendezvous(ray.util.get_node_ip_address())
        return self._rendezvous.init_method

    def gpu_ids(self) -> list[int]:
        """The GPUs that Ray assigned to this process."""
        import ray

        return [int(gpu) for gpu in ray.get_gpu_ids()]

    def start(self, init_method: str) -> RankCoordinates:
        """Joins the world and builds the model; must be called on all ranks at once."""
        import ray

        from gtpo_megatron.actor.actor import MegatronActor

        self._actor = MegatronActor(
            self._config,
            global_rank=self._global_rank,
            init_method=init_method,
            run_folder=self._run_folder,
            address=ray.util.get_node_ip_address(),
        )
        coordinates: RankCoordinates = self._actor.coordinates
        self._set_up_logs(
            rank_prefix(
                self._global_rank,
                tp=coordinates.tensor_index,
                pp=coordinates.pipeline_index,
                cp=coordinates.context_index,
                dp=coordinates.data_index,
            )
        )
        return coordinates

    def _held(self) -> Any:
        return self._actor


WORKER_DEATH_S = 2.0
"""How long a failed call waits for the death of a worker, whose peers may report their broken collective first. Less
than ``collect.GRACE_S``, so that the reason is still reported."""


def _ends_with_a_worker(method: Call) -> Call:
    """Ends the process if a call failed because a worker of the engine died."""

    @functools.wraps(method)
    def guarded(self: "EngineProcess", *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception:
            deadline = time.monotonic() + WORKER_DEATH_S
            while self._config.rollout.tensor_parallel_size > 1 and time.monotonic() < deadline:
                self._end_without_worker()
                time.sleep(0.05)
            raise

    return cast("Call", guarded)


class EngineProcess(_Process):
    """A rollout engine.

    With tensor parallelism vLLM starts worker processes. If one of them dies, this process ends too.

    Args:
        config: of the run, as ``to_plain`` made it.
        run_folder: for ``log.txt``.
        search_path: put first on the module path.
        prefix: of its log lines.
    """

    def __init__(self, config: dict[str, Any], run_folder: str, search_path: str, *, prefix: str) -> None:
        super().__init__(config, run_folder, prefix, search_path)
        self._engine: Any = None
        self._tickets: dict[Attempt, int] = {}

    def start(self) -> None:
        """Loads vLLM and the model."""
        from gtpo_megatron.rollout.vllm_engine import VllmEngine

        self._engine = VllmEngine(
            self._config.model.path,
            self._config.rollout,
            max_sequence_tokens=self._config.model.max_sequence_tokens,
            seed=self._config.seed,
            awaits_push=True,
        )
        self._engine.on_worker_death(self._end)

    def _held(self) -> Any:
        return self._engine

    def close(self) -> None:
        """Ends the workers and frees their shared memory."""
        if self._engine is not None:
            self._engine.close()

    def identity(self) -> tuple[str, int]:
        """Host name and process id; fails if a worker has died."""
        self._end_without_worker()
        return super().identity()

    def _end_without_worker(self) -> None:
        if self._engine is not None and self._engine.has_lost_worker():
            self._end()

    def _end(self) -> None:
        logger.error("a worker of this engine died; the engine ends with it")
        os._exit(1)  # immediately, because vLLM's cleanup would wait for the dead worker

    def generate(self, requests: Sequence[SampleRequest], sampling: SamplingConfig, seed: int) -> Iterator[Any]:
        """Samples; yields the handles of the groups, then the groups."""
        yield from handles_then_groups(split_by_group(self._sample(requests, sampling, seed)))

    @_ends_with_a_worker
    def _sample(self, requests: Sequence[SampleRequest], sampling: SamplingConfig, seed: int) -> RolloutBatch:
        batch: RolloutBatch = self._engine.generate(requests, sampling, seed=seed)
        return batch

    def sample_slice(
        self,
        begin: Mapping[Attempt, Sequence[SampleRequest]],
        abort: Sequence[Attempt],
        sampling: SamplingConfig,
        seed: int,
        limit_s: float,
    ) -> Iterator[Any]:
        """Begins and aborts groups, and samples for some time; see ``on_ray/group_slices.py``.

        Yields:
            First the handle of every complete group, by its try; then the groups, in that order.
        """
        yield from handles_then_groups(self._go_on(begin, abort, sampling, seed, limit_s))

    @_ends_with_a_worker
    def _go_on(
        self,
        begin: Mapping[Attempt, Sequence[SampleRequest]],
        abort: Sequence[Attempt],
        sampling: SamplingConfig,
        seed: int,
        limit_s: float,
    ) -> dict[Attempt, RolloutBatch]:
        for attempt in abort:
            self._engine.abort(self._tickets.pop(attempt))
        for attempt, requests in begin.items():
            self._tickets[attempt] = self._engine.begin(requests, sampling, seed=seed, priority=attempt.group)
        complete = set(self._engine.advance(limit_s=limit_s))
        ended = [attempt for attempt, ticket in self._tickets.items() if ticket in complete]
        return {attempt: self._engine.take(self._tickets.pop(attempt)) for attempt in ended}

    @_ends_with_a_worker
    def open_slots(self, workers: Sequence[int], shape: SlotShape) -> dict[int, SharedSlots]:
        """Opens shared memory on this node for the engine's workers."""
        slots: dict[int, SharedSlots] = self._engine.open_slots(workers, shape)
        return slots

    @_ends_with_a_worker
    def remove_slot_names(self) -> None:
        """Removes the slots' names, after both sides have mapped them."""
        self._engine.remove_slot_names()

    @_ends_with_a_worker
    def connect_weights(self, link: WeightLink, workers: Sequence[int]) -> None:
        """Opens the transport in every worker."""
        self._engine.connect_weights(link, workers)

    @_ends_with_a_worker
    def receive_weights(self, version: int, with_checksums: bool) -> Checksums:
        """Receives the weights in every worker; returns their checksums."""
        checksums: Checksums = self._engine.receive_weights(version, with_checksums=with_checksums)
        return checksums

    @_ends_with_a_worker
    def forget_prefixes(self) -> None:
        """Empties the prefix cache."""
        self._engine.forget_prefixes()

    @_ends_with_a_worker
    def sleep(self, keep_weights: bool) -> None:
        """Releases GPU memory."""
        self._engine.sleep(keep_weights=keep_weights)

    @_ends_with_a_worker
    def wake(self, what: str) -> None:
        """Allocates GPU memory again."""
        self._engine.wake(what)


class RewardProcess(_Process):
    """Decoding and grading."""

    def __init__(self, config: dict[str, Any], run_folder: str, search_path: str) -> None:
        super().__init__(config, run_folder, "[reward]", search_path)
        self._grader: Any = None

    def start(self) -> None:
        """Loads the tokenizer and starts the grading workers."""
        from gtpo_megatron.orchestration.stages.grading import build_grader

        self._grader = build_grader(self._config, self._run_folder)

    def grade(self, rollouts: RolloutHandle, prompts: PromptBatch) -> RewardBatch:
        """Grades every response."""
        rewards: RewardBatch = self._grader.score(rollouts, prompts)
        return rewards
