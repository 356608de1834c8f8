"""What the function of a check is given: the recipe, the processes of its run, and what earlier checks returned."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gtpo_megatron.companions.preflight.children import in_child
from gtpo_megatron.companions.preflight.expectations import NO_GPUS, Device, Expectations
from gtpo_megatron.companions.preflight.gpu_handover import GpuHandover
from gtpo_megatron.companions.preflight.memory_watch import MemoryWatch
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.orchestration.stages.processes import ProcessFunction, RunProcesses
from gtpo_megatron.orchestration.stages.stages import Stages
from gtpo_megatron.weights.architecture import Architecture
from gtpo_megatron.weights.config_json import read_architecture

CHILD_ENDS_S = 5.0
"""In which a process can say that its child has been ended."""


@dataclass(frozen=True, kw_only=True)
class PreflightContext:
    """The recipe, and its processes before they have models.

    Attributes:
        config: recipe with the deadlines of a preflight.
        output: folder on the disk of the run.
        seconds: time of the whole preflight.
        seconds_left: time of the running check that is left.
        values: return values of earlier checks, by name.
        processes: ranks and engines; none before they have started.
        devices: GPUs of each process.
        expected: figures of the planner.
    """

    config: RunConfig
    output: Path
    seconds: float
    seconds_left: Callable[[], float]
    values: Mapping[str, Any]
    processes: RunProcesses
    devices: Mapping[str, tuple[Device, ...]] = field(default_factory=dict)
    expected: Expectations = NO_GPUS

    @property
    def architecture(self) -> Architecture:
        """Shape of the model."""
        return read_architecture(Path(self.config.model.path))

    @property
    def has_gpus(self) -> bool:
        """Whether the run is on GPUs."""
        return self.expected.has_gpus

    @property
    def one_per_host(self) -> tuple[str, ...]:
        """The first process on every host."""
        first: dict[str, str] = {}
        for name in (*self.processes.ranks, *self.processes.engines):
            first.setdefault(self.processes.hosts[name], name)
        return tuple(first.values())

    def ask(self, names: tuple[str, ...], function: ProcessFunction, *arguments: Any) -> dict[str, Any]:
        """Runs a function in processes, within what is left of the running check."""
        return self.ask_each(function, dict.fromkeys(names, arguments))

    def ask_each(self, function: ProcessFunction, arguments: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
        """Runs it with arguments of its own in each process."""
        return self.processes.run(function, arguments, deadline_s=max(1.0, self.seconds_left()))

    def ask_children(self, names: tuple[str, ...], function: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Runs ``module:name`` in children of processes; one that hangs ends before the check, so that it is named."""
        timeout_s = max(1.0, self.seconds_left() - CHILD_ENDS_S)
        return self.ask(names, in_child, function, arguments, timeout_s)


@dataclass(frozen=True, kw_only=True)
class StepContext(PreflightContext):
    """The same with models loaded, for a step.

    Attributes:
        stages: stages of a step.
        memory: peaks of memory by phase.
        gpus: turns of trainer and engines.
    """

    stages: Stages
    memory: MemoryWatch
    gpus: GpuHandover
