"""The processes of a run, as soon as they are up and before any has loaded a model: functions can be run in them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

ProcessFunction = Callable[..., Any]
"""Function of a module that every process can import. Its first argument is the process's object: a rank's
``MegatronActor``, an engine's ``VllmEngine``, None before it has started."""

Call = Callable[[str, Mapping[str, Callable[[Any], Any]], float], dict[str, Any]]
"""Takes a stage, functions of the processes' objects (by name of the process), and a deadline in seconds; returns their
results by name. Raises WorkerError if a process died, raised, or has not answered in time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunProcesses:
    """The processes of ranks and engines.

    Attributes:
        ranks: names of the ranks, in order.
        engines: names of the engines, in order.
        hosts: host of each of them.
        call: way to call them.
    """

    ranks: tuple[str, ...]
    engines: tuple[str, ...]
    hosts: Mapping[str, str]
    call: Call

    def run(
        self, function: ProcessFunction, arguments: Mapping[str, tuple[Any, ...]], *, deadline_s: float
    ) -> dict[str, Any]:
        """Runs a function in some processes at once; returns its results by name.

        Args:
            function: the same in each.
            arguments: further arguments of the function, by process.
            deadline_s: seconds for all results.

        Raises:
            WorkerError: a process died, raised, or has not answered in time; the message names it.
        """

        def bound(given: tuple[Any, ...]) -> Callable[[Any], Any]:
            return lambda instance: function(instance, *given)

        return self.call(function.__name__, {name: bound(given) for name, given in arguments.items()}, deadline_s)


OnProcesses = Callable[[RunProcesses], None]
"""Called with the processes before any has loaded a model; what it raises ends the start."""


def ignore_processes(_processes: RunProcesses) -> None:
    """For a start that nobody looks at."""
