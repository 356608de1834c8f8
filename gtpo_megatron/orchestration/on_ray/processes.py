"""The processes of a run, as Ray actors: thin shells around the classes that a run in one process uses as they are."""

import functools
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from gtpo_megatron.actor.place import RankPlace
from gtpo_megatron.batch import PromptBatch, RewardBatch, RolloutBatch
from gtpo_megatron.config.rollout import SamplingConfig
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.distributed.rendezvous import MeetingPoint
from gtpo_megatron.observability.logs import rank_prefix, set_up_logs
from gtpo_megatron.orchestration.on_ray.rollouts import RolloutParts, ShardParts, summary_and_pieces
from gtpo_megatron.rollout.requests import SampleRequest
from gtpo_megatron.weights.push.link import WeightLink
from gtpo_megatron.weights.push.sender import Checksums
from gtpo_megatron.weights.push.transports.process_group import open_store
from gtpo_megatron.weights.push.transports.shared_memory import SharedSlots, SlotShape

logger = logging.getLogger(__name__)

Call = TypeVar("Call", bound=Callable[..., Any])


class _Process:
    """What every process of a run does first.

    Args:
        config: of the run.
        run_folder: for ``log.txt``.
        prefix: of its log lines.
        search_path: put first on the module path, as the driver's is, so that a reward of the user's own is found.
    """

    def __init__(self, config: RunConfig, run_folder: str, prefix: str, search_path: str) -> None:
        if search_path not in sys.path:
            sys.path.insert(0, search_path)
        self._config = config
        self._run_folder = Path(run_folder)
        self._set_up_logs(prefix)

    def _set_up_logs(self, prefix: str) -> None:
        set_up_logs(level=self._config.logging.log_level, run_folder=self._run_folder, prefix=prefix)

    def identity(self) -> tuple[str, int]:
        """Host name and process id."""
        return socket.gethostname(), os.getpid()


class RankProcess(_Process):
    """A Megatron rank."""

    def __init__(self, config: RunConfig, run_folder: str, search_path: str, *, global_rank: int) -> None:
        super().__init__(config, run_folder, rank_prefix(global_rank), search_path)
        self._global_rank = global_rank
        self._actor: Any = None
        self._meeting_point: MeetingPoint | None = None
        self._store: Any = None  # alive as long as this process: others meet there

    def meeting_point(self) -> str:
        """An address on this node where the ranks can meet, with this one as rank 0."""
        import ray

        self._meeting_point = MeetingPoint(ray.util.get_node_ip_address())
        return self._meeting_point.init_method

    def gpu_ids(self) -> list[int]:
        """That Ray gave to this process."""
        import ray

        return [int(gpu) for gpu in ray.get_gpu_ids()]

    def open_weight_store(self, deadline_s: float) -> tuple[str, int]:
        """A store on this node where trainer and sampler can meet."""
        import ray

        host = ray.util.get_node_ip_address()
        self._store = open_store(host, deadline_s=deadline_s)
        return host, self._store.port

    def start(self, init_method: str) -> RankPlace:
        """Joins the world and builds the model; all ranks at once."""
        from gtpo_megatron.actor.actor import MegatronActor

        self._actor = MegatronActor(
            self._config, global_rank=self._global_rank, init_method=init_method, run_folder=self._run_folder
        )
        place: RankPlace = self._actor.place
        self._set_up_logs(
            rank_prefix(
                self._global_rank,
                tp=place.tensor_index,
                pp=place.pipeline_index,
                cp=place.context_index,
                dp=place.data_index,
            )
        )
        return place

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """A method of ``MegatronActor``; a shard in pieces arrives gathered, a reference as what it refers to."""
        gathered = [value.gather() if isinstance(value, ShardParts) else value for value in args]
        return getattr(self._actor, method)(*gathered, **kwargs)


WORKER_DEATH_S = 2.0
"""How long a failed call looks for a dead worker: its peers may report their broken collective before it is gone. Less
than ``collect``'s patience after a first failure, so that the reason is still heard."""


def _ends_with_a_worker(method: Call) -> Call:
    """Ends the process where a call failed because a worker of the engine's died: whoever called replaces it whole."""

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

    With tensor parallelism vLLM has worker processes of its own. Where one of them dies this process ends too, so that
    an engine is either whole or dead.

    Args:
        config: of the run.
        run_folder: for ``log.txt``.
        search_path: put first on the module path.
        prefix: of its log lines.
    """

    def __init__(self, config: RunConfig, run_folder: str, search_path: str, *, prefix: str) -> None:
        super().__init__(config, run_folder, prefix, search_path)
        self._engine: Any = None

    def start(self) -> None:
        """Loads vLLM and the model."""
        from gtpo_megatron.rollout.vllm_engine import VllmEngine

        self._engine = VllmEngine(
            self._config.model.path,
            self._config.rollout,
            max_sequence_tokens=self._config.model.max_sequence_tokens,
            seed=self._config.seed,
            num_threads=self._config.cluster.engine_threads,
        )
        self._engine.on_worker_death(self._end)

    def close(self) -> None:
        """Ends the workers and gives back what they share."""
        if self._engine is not None:
            self._engine.close()

    def identity(self) -> tuple[str, int]:
        """Host name and process id, of an engine that is whole."""
        self._end_without_worker()
        return super().identity()

    def _end_without_worker(self) -> None:
        if self._engine is not None and self._engine.has_lost_worker():
            self._end()

    def _end(self) -> None:
        logger.error("a worker of this engine died; the engine ends with it")
        os._exit(1)  # at once: what vLLM would tidy up waits for the dead worker

    def generate(self, requests: Sequence[SampleRequest], sampling: SamplingConfig, seed: int) -> Iterator[Any]:
        """Summary and pieces of the responses."""
        yield from summary_and_pieces(self._sample(requests, sampling, seed))

    @_ends_with_a_worker
    def _sample(self, requests: Sequence[SampleRequest], sampling: SamplingConfig, seed: int) -> RolloutBatch:
        batch: RolloutBatch = self._engine.generate(requests, sampling, seed=seed)
        return batch

    @_ends_with_a_worker
    def begin(self, requests: Sequence[SampleRequest], sampling: SamplingConfig, seed: int, priority: int) -> int:
        """Starts to sample; the ticket to ask for the responses with."""
        ticket: int = self._engine.begin(requests, sampling, seed=seed, priority=priority)
        return ticket

    def advance(self, ticket: int, limit_s: float) -> Iterator[Any]:
        """Goes on with everything that was begun; what ``generate`` yields, or None: it is not whole yet."""
        batch = self._go_on(ticket, limit_s)
        if batch is None:
            yield None
        else:
            yield from summary_and_pieces(batch)

    @_ends_with_a_worker
    def _go_on(self, ticket: int, limit_s: float) -> RolloutBatch | None:
        batch: RolloutBatch | None = self._engine.advance(ticket, limit_s=limit_s)
        return batch

    @_ends_with_a_worker
    def open_slots(self, workers: Sequence[int], shape: SlotShape) -> dict[int, SharedSlots]:
        """Shared memory on this node for the engine's workers."""
        slots: dict[int, SharedSlots] = self._engine.open_slots(workers, shape)
        return slots

    @_ends_with_a_worker
    def remove_slot_names(self) -> None:
        """Both sides have mapped the slots."""
        self._engine.remove_slot_names()

    @_ends_with_a_worker
    def connect_weights(self, link: WeightLink, workers: Sequence[int]) -> None:
        """Every worker opens its end."""
        self._engine.connect_weights(link, workers)

    @_ends_with_a_worker
    def receive_weights(self, version: int, with_checksums: bool) -> Checksums:
        """Every worker takes its part."""
        checksums: Checksums = self._engine.receive_weights(version, with_checksums=with_checksums)
        return checksums

    @_ends_with_a_worker
    def forget_prefixes(self) -> None:
        """Empties the prefix cache."""
        self._engine.forget_prefixes()

    @_ends_with_a_worker
    def sleep(self, keep_weights: bool) -> None:
        """Lets GPU memory go."""
        self._engine.sleep(keep_weights=keep_weights)

    @_ends_with_a_worker
    def wake(self, what: str) -> None:
        """Takes GPU memory back."""
        self._engine.wake(what)


class RewardProcess(_Process):
    """Decoding and grading."""

    def __init__(self, config: RunConfig, run_folder: str, search_path: str) -> None:
        super().__init__(config, run_folder, "[reward]", search_path)
        self._grader: Any = None

    def start(self) -> None:
        """Loads the tokenizer and starts the grading workers."""
        from gtpo_megatron.orchestration.stages.grading import build_grader

        self._grader = build_grader(self._config)

    def grade(self, rollouts: RolloutParts, prompts: PromptBatch) -> RewardBatch:
        """One verdict per response; only one piece of the responses is in memory at a time."""
        texts = [""] * len(rollouts.rows)
        groups = [0] * len(rollouts.rows)
        for places, piece in rollouts.one_by_one():
            decoded = self._grader.decode(piece)
            for place, text, group in zip(places, decoded, piece.group_ids.tolist(), strict=True):
                texts[place], groups[place] = text, group
        rewards: RewardBatch = self._grader.grade(texts, groups, prompts)
        return rewards
