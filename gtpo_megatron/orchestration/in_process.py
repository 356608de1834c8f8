"""All stages of a step in this process, without Ray, for tests and debugging."""

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NoReturn

from gtpo_megatron.actor.place import RankPlace
from gtpo_megatron.batch import PromptBatch, RewardBatch, RolloutBatch, TokenRecord
from gtpo_megatron.config.rollout import SamplingConfig, WeightSyncConfig
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.distributed.rendezvous import ONE_MACHINE
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.mismatch.gap_report import GapReport, merged
from gtpo_megatron.observability.known_warnings import known_to_file
from gtpo_megatron.observability.metrics import merge
from gtpo_megatron.observability.timers import StageTimers
from gtpo_megatron.orchestration.stages.colocation import memory_sharing_of
from gtpo_megatron.orchestration.stages.grading import build_grader
from gtpo_megatron.orchestration.stages.inspection import NOBODY, Inspector, Question
from gtpo_megatron.orchestration.stages.protocols import Metrics, Stages
from gtpo_megatron.orchestration.stages.rollouts import RolloutHandle, shards
from gtpo_megatron.orchestration.stages.weight_link import connect
from gtpo_megatron.orchestration.watch.own_engine import swept_process
from gtpo_megatron.rollout.environment import engine_environment
from gtpo_megatron.rollout.requests import requests_for
from gtpo_megatron.weights.push.link import WeightLink
from gtpo_megatron.weights.push.sender import Checksums
from gtpo_megatron.weights.push.sync import WeightSync
from gtpo_megatron.weights.push.transports.process_group import open_store
from gtpo_megatron.weights.push.transports.shared_memory import SharedSlots, SlotShape

HOST = "127.0.0.1"
"""Address of both sides."""


class LocalEngine:
    """The sampler; a handle has the batch itself."""

    num_restarts = 0

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.remove_slot_names = engine.remove_slot_names
        self.forget_prefixes = engine.forget_prefixes

    def sleep(self, *, keep_weights: bool) -> None:
        """Releases GPU memory."""
        self._engine.sleep(keep_weights=keep_weights)

    def wake(self, what: Literal["weights", "kv_cache"]) -> None:
        """Allocates GPU memory again."""
        self._engine.wake(what)

    def unattended(self) -> "LocalEngine":
        """Returns itself: the engine cannot die alone."""
        return self

    def group_sampler(self, sampling: SamplingConfig, *, samples_per_prompt: int, seed: int) -> NoReturn:
        """Refused by the configuration: an engine in the trainer's process is not paused for a push."""
        del sampling, samples_per_prompt, seed
        raise ConfigError("cluster.mode='local' samples the groups of a step together; use mode='ray'")

    def replace_lost(self) -> bool:
        """Does nothing: the engine cannot die alone."""
        return False

    def abandon(self) -> None:
        """Does nothing: the engine ends with this process."""

    def hold(self, rollouts: RolloutBatch) -> RolloutHandle:
        """Returns a handle of a batch."""
        return RolloutHandle.of(rollouts)

    def generate(
        self, prompts: PromptBatch, sampling: SamplingConfig, *, samples_per_prompt: int, seed: int
    ) -> RolloutHandle:
        """Samples responses."""
        return RolloutHandle.of(self._engine.generate(requests_for(prompts, samples_per_prompt), sampling, seed=seed))

    def hosts(self) -> list[str]:
        """The host of the engine."""
        return [HOST]

    def open_slots(self, shape: SlotShape) -> dict[int, SharedSlots]:
        """Opens the slots of every worker of the engine."""
        slots: dict[int, SharedSlots] = self._engine.open_slots(range(self._engine.num_workers), shape)
        return slots

    def connect_weights(self, link: WeightLink) -> None:
        """Opens the transport in every worker."""
        self._engine.connect_weights(link, range(self._engine.num_workers))


class LocalActor:
    """One Megatron rank, which holds all rows."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self.padded_vocab_size = actor.padded_vocab_size
        self.connect_weights = actor.connect_weights
        self._store: Any = None

    def places(self) -> list[tuple[RankPlace, str]]:
        """Place and host of the rank."""
        return [(self._actor.place, HOST)]

    def open_weight_store(self, deadline_s: float) -> tuple[str, int]:
        """Opens a store in this process."""
        self._store = open_store(HOST, deadline_s=deadline_s)
        return HOST, self._store.port

    def score_tokens(self, rollouts: RolloutHandle) -> Metrics:
        """Scores all responses."""
        return merge([self._actor.score_tokens(shards(rollouts, 1)[0].fetch())])

    def use_sampler_scores(self, rollouts: RolloutHandle) -> Metrics:
        """Uses the sampler's scores."""
        return merge([self._actor.use_sampler_scores(shards(rollouts, 1)[0].fetch())])

    def assign_credit(self, rewards: RewardBatch) -> Metrics:
        """Computes the advantages of all responses."""
        return merge([self._actor.assign_credit(rewards)])

    def update(self, *, step: int) -> Metrics:
        """Runs the optimizer updates of a step."""
        return merge([self._actor.update(step)])

    def sample_records(self, group_ids: Sequence[int]) -> list[TokenRecord]:
        """Returns the records of the chosen groups' responses."""
        return [record for _, record in self._actor.sample_records(list(group_ids))]

    def explain_gap(self, typical_nats: float) -> GapReport:
        """The report on all responses."""
        return merged([self._actor.explain_gap(typical_nats)])

    def expert_load(self) -> dict[int, list[int]]:
        """Tokens of each expert, by layer."""
        return self._actor.expert_load()

    def release_batch(self) -> None:
        """Frees the step's batch."""
        self._actor.release_batch()

    def offload(self) -> None:
        """Moves gradients and optimizer state to the host."""
        self._actor.offload()

    def onload(self) -> None:
        """Moves gradients and optimizer state back to the GPU."""
        self._actor.onload()

    def begin_save(self, folder: Path, *, in_background: bool) -> None:
        """Takes a snapshot and starts to write the trainer's part of a checkpoint."""
        self._actor.begin_save(str(folder), in_background)

    def is_save_written(self) -> bool:
        """Whether the trainer's part is written."""
        return bool(self._actor.is_save_written())

    def finish_save(self) -> dict[str, str]:
        """Waits for the trainer's part."""
        checksums: dict[str, str] = self._actor.finish_save()
        return checksums

    def load(self, folder: Path, *, checksums: Mapping[str, str]) -> None:
        """Restores the trainer's part of a checkpoint."""
        self._actor.load(str(folder), dict(checksums))


class _Transfer:
    """Both sides of a push in one process: the trainer sends in a thread."""

    def __init__(self, trainer: Any, sampler: Any) -> None:
        self._trainer, self._sampler = trainer, sampler

    def __call__(self, version: int, *, with_checksums: bool) -> tuple[Checksums, Checksums]:
        """Sends and receives the weights of ``version``; returns the checksums of both sides."""
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(self._trainer.send_weights, version, with_checksums)
            received = self._sampler.receive_weights(version, with_checksums=with_checksums)
            return sending.result(), received


class LocalMachines:
    """See ``Machines``: rank and engine are in this process.

    Attributes:
        ranks: name of the rank.
        engines: name of the engine.
        hosts: this host, of both.
        held: the rank's and the engine's object, once they have started.
    """

    ranks = ("rank 0",)
    engines = ("rollout engine",)

    def __init__(self) -> None:
        self.hosts = dict.fromkeys((*self.ranks, *self.engines), HOST)
        self.held: dict[str, Any] = {}

    def ask(self, question: Question, arguments: Mapping[str, tuple[Any, ...]], *, deadline_s: float) -> dict[str, Any]:
        """Calls the question here; ``deadline_s`` is not kept, since nothing could end it."""
        del deadline_s
        return {name: question(self.held.get(name), *given) for name, given in arguments.items()}


@contextmanager
def local_stages(
    config: RunConfig, run_folder: Path, timers: StageTimers, *, inspector: Inspector = NOBODY
) -> Iterator[Stages]:
    """Starts the stages of a step in this process."""
    import torch

    os.environ.update(ONE_MACHINE | engine_environment(config.rollout, has_gpus=torch.cuda.is_available()))
    from gtpo_megatron.actor.actor import MegatronActor
    from gtpo_megatron.rollout.vllm_engine import VllmEngine

    machines = LocalMachines()
    inspector.processes_are_up(machines)
    with swept_process(), tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        timers.starting("building the model")
        # the trainer first: vLLM can use an existing torch.distributed world of one, Megatron cannot
        trainer = MegatronActor(config, global_rank=0, init_method=f"file://{folder}/store", run_folder=run_folder)
        stack.callback(trainer.close)
        timers.starting("loading the engine")
        with known_to_file():
            sampler = VllmEngine(
                config.model.path,
                config.rollout,
                max_sequence_tokens=config.model.max_sequence_tokens,
                seed=config.seed,
                awaits_push=True,
            )
        stack.callback(
            sampler.close
        )  # before the trainer's: vLLM leaves the world's groups, and raises if they are gone
        grader = build_grader(config, run_folder)
        stack.callback(grader.close)
        engine, actor = LocalEngine(sampler), LocalActor(trainer)
        connect(config, actor, engine, has_gpus=torch.cuda.is_available())
        transfer = _Transfer(trainer, sampler)
        machines.held = {"rank 0": trainer, "rollout engine": sampler}

        def relink(sync: WeightSyncConfig) -> WeightSync:
            connect(replace(config, weight_sync=sync), actor, engine, has_gpus=torch.cuda.is_available())
            return WeightSync(sync, transfer)

        inspector.link_is_open(relink)
        yield Stages(
            engine=engine,
            reward=grader,
            actor=actor,
            weight_sync=WeightSync(config.weight_sync, transfer),
            memory_sharing=memory_sharing_of(config.rollout, actor, engine),
            timers=timers,
        )
