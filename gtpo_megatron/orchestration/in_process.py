"""All stages of a step in this process, without Ray, for tests and debugging."""

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

from gtpo_megatron.batch import PromptBatch, RolloutBatch
from gtpo_megatron.config.rollout import SamplingConfig, WeightSyncConfig
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.distributed.rendezvous import ONE_MACHINE
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.observability.known_warnings import known_to_file
from gtpo_megatron.observability.timers import StageTimers
from gtpo_megatron.orchestration.stages.grading import build_grader
from gtpo_megatron.orchestration.stages.inspection import NOBODY, Inspector, Question
from gtpo_megatron.orchestration.stages.rollouts import RolloutHandle
from gtpo_megatron.orchestration.stages.stages import MemorySharing, Stages
from gtpo_megatron.orchestration.stages.trainer import Trainer
from gtpo_megatron.orchestration.stages.weight_link import connect
from gtpo_megatron.orchestration.watch.own_engine import swept_process
from gtpo_megatron.rollout.environment import engine_environment
from gtpo_megatron.rollout.requests import requests_for
from gtpo_megatron.weights.push.link import WeightLink
from gtpo_megatron.weights.push.sender import Checksums
from gtpo_megatron.weights.push.sync import WeightSync
from gtpo_megatron.weights.push.transports.shared_memory import SharedSlots, SlotShape

if TYPE_CHECKING:
    from gtpo_megatron.actor.actor import MegatronActor

Answer = TypeVar("Answer")

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


class LocalRanks:
    """``stages.trainer.Ranks`` of one rank, which is in this process."""

    hosts = (HOST,)

    def __init__(self, actor: "MegatronActor") -> None:
        self._actor = actor
        self.places = (actor.coordinates,)

    def call(self, stage: str, functions: "Sequence[Callable[[MegatronActor], Answer]]") -> list[Answer]:
        """Calls the function of the rank."""
        del stage  # what it raises comes from here
        return [function(self._actor) for function in functions]


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
        actor = MegatronActor(config, global_rank=0, init_method=f"file://{folder}/store", run_folder=run_folder)
        stack.callback(actor.close)
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
        engine, trainer = LocalEngine(sampler), Trainer(LocalRanks(actor))
        connect(config, trainer, engine, has_gpus=torch.cuda.is_available())
        transfer = _Transfer(actor, sampler)
        machines.held = {"rank 0": actor, "rollout engine": sampler}

        def relink(sync: WeightSyncConfig) -> WeightSync:
            connect(replace(config, weight_sync=sync), trainer, engine, has_gpus=torch.cuda.is_available())
            return WeightSync(sync, transfer)

        inspector.link_is_open(relink)
        yield Stages(
            engine=engine,
            reward=grader,
            trainer=trainer,
            weight_sync=WeightSync(config.weight_sync, transfer),
            memory_sharing=MemorySharing(trainer, engine, is_colocated=config.rollout.placement == "colocated"),
            timers=timers,
        )
