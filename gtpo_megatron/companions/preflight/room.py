"""What checks are given: the recipe, the processes so far, what earlier checks have left; turns on shared GPUs."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gtpo_megatron.batch import PromptBatch, RewardBatch
from gtpo_megatron.companions.planner.hardware import GPUName
from gtpo_megatron.companions.preflight.children import in_child
from gtpo_megatron.companions.preflight.expectations import Device, Expectations
from gtpo_megatron.companions.preflight.memory_watch import MemoryWatch
from gtpo_megatron.companions.preflight.runner import CheckRunner
from gtpo_megatron.config.model import ELEMENT_BYTES
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.errors import WorkerError
from gtpo_megatron.mismatch.gate import MismatchGate
from gtpo_megatron.orchestration.loop.inputs import RunInputs
from gtpo_megatron.orchestration.stages.inspection import Machines, Relink, RemoteFunction
from gtpo_megatron.orchestration.stages.rollouts import RolloutHandle
from gtpo_megatron.orchestration.stages.stages import Stages
from gtpo_megatron.weights.adapter_shapes import num_parameters
from gtpo_megatron.weights.architecture import read_architecture
from gtpo_megatron.weights.push.wire import wire_dtype
from gtpo_megatron.weights.reshard import hf_shapes

CHILD_ENDS_S = 5.0
"""In which a process can say that its child has been ended."""


@dataclass(slots=True)
class Room:
    """The only thing here that changes; each field is filled by the part named beside it.

    Attributes:
        config: of the recipe, with the deadlines of a preflight.
        output: folder, on the disk of the run.
        gpu: kind of GPU that the user named.
        runner: for deadlines.
        memory: peaks by phase.
        machines: processes (start).
        devices: GPUs of each process (start).
        expected: by the planner (start).
        inputs: problems (check ``inputs``).
        stages: of a step (start).
        relink: opens another transport (start).
        gate: with the recipe's limits of the mismatch.
        moves: between trainer and engines (start).
        prompts: of a step (check ``generate``).
        sampled: responses (check ``generate``).
        mean_prompt: tokens of a prompt (check ``generate``).
        mean_response: tokens of a response, or the plan's assumption where responses were cut (check ``generate``).
        rewards: of the responses (check ``rewards``).
        seconds: of parts of a step as they would be at the recipe's size, by part.
    """

    config: RunConfig
    output: Path
    gpu: GPUName | None
    runner: CheckRunner
    memory: MemoryWatch
    gate: MismatchGate
    machines: Machines | None = None
    devices: Mapping[str, tuple[Device, ...]] = field(default_factory=dict)
    expected: Expectations = Expectations(gpu=None, why_no_rates="no GPU")
    inputs: RunInputs | None = None
    stages: Stages | None = None
    relink: Relink | None = None
    moves: "Turns | None" = None
    prompts: PromptBatch | None = None
    sampled: RolloutHandle | None = None
    mean_prompt: float = 0.0
    mean_response: float = 0.0
    rewards: RewardBatch | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def processes(self) -> Machines:
        """The processes.

        Raises:
            WorkerError: there are none.
        """
        if self.machines is None:
            raise WorkerError("the processes did not start; see the line that says why")
        return self.machines

    @property
    def running(self) -> Stages:
        """The stages of a step.

        Raises:
            WorkerError: they did not start.
        """
        if self.stages is None:
            raise WorkerError("trainer and sampler did not start; see the line that says why")
        return self.stages

    @property
    def turns(self) -> "Turns":
        """Moves between trainer and engines.

        Raises:
            WorkerError: they did not start.
        """
        if self.moves is None:
            self.moves = Turns(self.running, self.memory)
        return self.moves

    @property
    def transport(self) -> str:
        """Transport of the run's pushes."""
        return self.config.transport(has_gpus=self.expected.has_gpus)

    @property
    def pushed_bytes(self) -> int:
        """Bytes of a push: the whole model, or the adapters alone, into every engine, in the dtype that travels."""
        config, arch = self.config, read_architecture(Path(self.config.model.path))
        if config.adapter.pushes_alone:
            elements = num_parameters(arch, config.adapter)
        else:
            elements = sum(math.prod(shape) for shape in hf_shapes(arch).values())
        itemsize = ELEMENT_BYTES[wire_dtype(config.model.dtype, config.rollout.dtype)]
        return elements * itemsize * config.rollout.num_engines

    def ask(self, names: tuple[str, ...], question: RemoteFunction, *arguments: Any) -> dict[str, Any]:
        """Asks processes the same, under the running check's limit."""
        return self.ask_each(question, dict.fromkeys(names, arguments))

    def ask_each(self, question: RemoteFunction, arguments: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
        """Asks each process with arguments of its own."""
        return self.processes.run(question, arguments, deadline_s=self.runner.limit_s)

    def ask_children(self, names: tuple[str, ...], function: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Asks children of processes; one that hangs is ended before the check's limit, so that it is named."""
        timeout_s = max(1.0, self.runner.limit_s - CHILD_ENDS_S)
        return self.ask(names, in_child, function, arguments, timeout_s)

    def one_per_host(self) -> tuple[str, ...]:
        """The first process on every host."""
        machines = self.processes
        first: dict[str, str] = {}
        for name in (*machines.ranks, *machines.engines):
            first.setdefault(machines.hosts[name], name)
        return tuple(first.values())

    def with_devices(self) -> tuple[str, ...]:
        """Processes that together have every GPU once; on CPUs the ranks."""
        machines = self.processes
        shares = self.config.rollout.placement == "colocated"
        return machines.ranks if shares or not self.expected.has_gpus else (*machines.ranks, *machines.engines)


class Turns:
    """Moves between trainer and engines as a step does: an engine that has slept gets its weights by a push.

    Args:
        stages: of a step, as they are after the start: the engines are asleep.
        memory: is told the phases.

    Attributes:
        version: of the trainer's weights.
        seconds: of the last ``to_trainer``, ``to_push``, ``push`` and ``to_engine``.
    """

    def __init__(self, stages: Stages, memory: MemoryWatch) -> None:
        self._stages, self._memory = stages, memory
        self._turn: Literal["trainer", "engine"] = "trainer"
        self._has_begun = False
        self.version = 0
        self.seconds: dict[str, float] = {}

    def trainer(self, *, keep_weights: bool = False) -> None:
        """The trainer's turn."""
        if self._turn == "engine" or not self._has_begun:
            with self._timed("to_trainer"):
                self._stages.memory_sharing.to_trainer(keep_weights=keep_weights)
        self._turn, self._has_begun = "trainer", True

    def engine(self) -> None:
        """The engines' turn, with the trainer's weights.

        Raises:
            WeightSyncError: they did not arrive as they were sent.
        """
        if self._turn == "engine":
            return
        self.trainer()
        with self._timed("to_push"):
            self._stages.memory_sharing.to_push()
        with self._memory.phase("push"), self._timed("push"):
            self._stages.weight_sync.push(version=self.version)
        with self._timed("to_engine"):
            self._stages.memory_sharing.to_engine()
        self._turn = "engine"

    def updated(self) -> None:
        """The trainer has made an update: its weights are a new version, which the engines do not have."""
        self.version += 1

    def _timed(self, name: str) -> "_Timed":
        return _Timed(self.seconds, name)


class _Timed:
    """Writes the seconds of its block under a name."""

    def __init__(self, seconds: dict[str, float], name: str) -> None:
        self._seconds, self._name = seconds, name

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *exc_info: object) -> None:
        self._seconds[self._name] = time.perf_counter() - self._began
