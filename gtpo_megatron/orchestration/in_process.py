"""All stages of a step in this process, without Ray, for tests and debugging."""

import os
import tempfile
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gtpo_megatron.batch import RolloutBatch
from gtpo_megatron.config.rollout import WeightSyncConfig
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.distributed.rendezvous import ONE_MACHINE
from gtpo_megatron.observability.known_warnings import expected_warnings_to_log
from gtpo_megatron.observability.timers import StageTimers
from gtpo_megatron.orchestration.run_supervisor import swept_process
from gtpo_megatron.orchestration.stages.engines import Engines
from gtpo_megatron.orchestration.stages.environment_rewards import environment_rewards
from gtpo_megatron.orchestration.stages.grading import build_grader
from gtpo_megatron.orchestration.stages.processes import OnProcesses, RunProcesses, ignore_processes
from gtpo_megatron.orchestration.stages.rollouts import Chunk, RolloutHandle
from gtpo_megatron.orchestration.stages.stages import Grade, MemorySharing, Stages
from gtpo_megatron.orchestration.stages.trainer import Trainer
from gtpo_megatron.orchestration.stages.weight_link import connect
from gtpo_megatron.rollout.engine_arguments import engine_environment
from gtpo_megatron.weights.checksum import Checksums
from gtpo_megatron.weights.push.sync import WeightSync

if TYPE_CHECKING:
    from gtpo_megatron.actor.actor import MegatronActor
    from gtpo_megatron.rollout.vllm_engine import VllmEngine

Result = TypeVar("Result")
Key = TypeVar("Key", bound=Hashable)

HOST = "127.0.0.1"
"""Address of both sides."""

RANK, ENGINE = "rank 0", "rollout engine"
"""Names of the two in messages."""


class LocalEngines(Engines):
    """One engine, which is in this process; a handle has the batch itself."""

    def __init__(self, engine: "VllmEngine") -> None:
        super().__init__(
            (HOST,) * engine.num_workers, workers_per_engine=engine.num_workers, has_environment=engine.has_environment
        )
        self._engine = engine

    def run_on_each(self, stage: str, functions: "Mapping[int, Callable[[VllmEngine], Result]]") -> dict[int, Result]:
        """Calls the function of the engine."""
        del stage  # what it raises comes from here
        return {index: function(self._engine) for index, function in functions.items()}

    def sample(
        self, functions: "Mapping[int, Callable[[VllmEngine], Mapping[Key, Chunk]]]"
    ) -> dict[int, dict[Key, RolloutHandle]]:
        """Calls the function of the engine."""
        return {
            index: {key: RolloutHandle.of(*chunk) for key, chunk in chunks.items()}
            for index, chunks in self.run_on_each("rollout", functions).items()
        }

    def store(self, rollouts: RolloutBatch) -> RolloutHandle:
        """Returns a handle of a batch."""
        return RolloutHandle.of(rollouts)


class LocalRanks:
    """``stages.trainer.Ranks`` of one rank, which is in this process."""

    hosts = (HOST,)

    def __init__(self, actor: "MegatronActor") -> None:
        self._actor = actor
        self.coordinates = (actor.coordinates,)

    def run_on_each(self, stage: str, functions: "Sequence[Callable[[MegatronActor], Result]]") -> list[Result]:
        """Calls the function of the rank."""
        del stage  # what it raises comes from here
        return [function(self._actor) for function in functions]


class _Transfer:
    """Both sides of a push in one process: the trainer sends in a thread."""

    def __init__(self, actor: "MegatronActor", engine: "VllmEngine") -> None:
        self._actor, self._engine = actor, engine

    def __call__(self, version: int, *, with_checksums: bool) -> tuple[Checksums, Checksums]:
        """Sends and receives the weights of ``version``; returns the checksums of both sides."""
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(self._actor.send_weights, version, with_checksums)
            received = self._engine.weights.receive(version, with_checksums=with_checksums)
            return sending.result(), received


@contextmanager
def local_trainer(
    config: RunConfig, run_folder: Path, timers: StageTimers, *, on_processes: OnProcesses = ignore_processes
) -> Iterator[Trainer]:
    """One rank in this process, and nothing else: nothing is sampled and nothing graded."""
    os.environ.update(ONE_MACHINE)
    from gtpo_megatron.actor.actor import MegatronActor

    def call(_stage: str, functions: Mapping[str, Callable[[Any], Any]], _deadline_s: float) -> dict[str, Any]:
        return {name: function(None) for name, function in functions.items()}

    on_processes(RunProcesses(ranks=(RANK,), engines=(), hosts={RANK: HOST}, call=call))
    with swept_process(), tempfile.TemporaryDirectory() as folder:
        timers.starting("building the model")
        actor = MegatronActor(config, global_rank=0, init_method=f"file://{folder}/store", run_folder=run_folder)
        try:
            yield Trainer(LocalRanks(actor))
        finally:
            actor.close()


@contextmanager
def local_stages(
    config: RunConfig, run_folder: Path, timers: StageTimers, *, on_processes: OnProcesses = ignore_processes
) -> Iterator[Stages]:
    """Starts the stages of a step in this process."""
    import torch

    os.environ.update(ONE_MACHINE | engine_environment(config.rollout, has_gpus=torch.cuda.is_available()))
    from gtpo_megatron.actor.actor import MegatronActor
    from gtpo_megatron.rollout.vllm_engine import VllmEngine

    instances: dict[str, Any] = {}  # the rank's and the engine's object, once they have started

    def call(_stage: str, functions: Mapping[str, Callable[[Any], Any]], _deadline_s: float) -> dict[str, Any]:
        return {name: function(instances.get(name)) for name, function in functions.items()}

    on_processes(RunProcesses(ranks=(RANK,), engines=(ENGINE,), hosts=dict.fromkeys((RANK, ENGINE), HOST), call=call))
    with swept_process(), tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        timers.starting("building the model")
        # the trainer first: vLLM can use an existing torch.distributed world of one, Megatron cannot
        actor = MegatronActor(config, global_rank=0, init_method=f"file://{folder}/store", run_folder=run_folder)
        stack.callback(actor.close)
        timers.starting("loading the engine")
        with expected_warnings_to_log():
            engine = VllmEngine(
                config.model.path,
                config.rollout,
                max_sequence_tokens=config.model.max_sequence_tokens,
                seed=config.seed,
                environment=config.environment.within(config.cluster.stage_deadline_s),
                data=config.data,
                awaits_push=True,
                adapter=config.adapter,
            )
        # before the trainer's: vLLM leaves the world's groups, and raises if they are gone
        stack.callback(engine.close)
        grade: Grade = environment_rewards
        if not config.environment.name:
            grader = build_grader(config, run_folder)
            stack.callback(grader.close)
            grade = grader.grade
        engines, trainer = LocalEngines(engine), Trainer(LocalRanks(actor))
        connect(config, trainer, engines, has_gpus=torch.cuda.is_available())
        transfer = _Transfer(actor, engine)
        instances |= {RANK: actor, ENGINE: engine}

        def open_link(sync: WeightSyncConfig) -> WeightSync:
            connect(replace(config, weight_sync=sync), trainer, engines, has_gpus=torch.cuda.is_available())
            return WeightSync(sync, transfer)

        yield Stages(
            engine=engines,
            grade=grade,
            trainer=trainer,
            weight_sync=WeightSync(config.weight_sync, transfer),
            memory_sharing=MemorySharing(
                trainer, engines, is_colocated=config.rollout.placement == "colocated", timers=timers
            ),
            timers=timers,
            open_link=open_link,
        )
