"""What a companion may see of a run that starts: its processes, in which it may run functions, and its link."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gtpo_megatron.config.rollout import WeightSyncConfig
from gtpo_megatron.weights.push.sync import WeightSync

RemoteFunction = Callable[..., Any]
"""A function of a module that every process can import. Its first argument is the process's object: a rank's
``MegatronActor``, an engine's ``VllmEngine``, None before it has started."""

Relink = Callable[[WeightSyncConfig], WeightSync]
"""Opens the link for pushes anew, with another transport."""


Call = Callable[[str, Mapping[str, Callable[[Any], Any]], float], dict[str, Any]]
"""Takes a stage, functions of the processes' objects (by name of the process), and a deadline in seconds; returns their
results by name. Raises WorkerError if a process died, raised, or has not answered in time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machines:
    """The processes of ranks and engines.

    Attributes:
        ranks: names of the ranks, in order.
        engines: names of the engines, in order.
        hosts: host of each of them.
        call: calls them.
    """

    ranks: tuple[str, ...]
    engines: tuple[str, ...]
    hosts: Mapping[str, str]
    call: Call

    def run(
        self, function: RemoteFunction, arguments: Mapping[str, tuple[Any, ...]], *, deadline_s: float
    ) -> dict[str, Any]:
        """Runs a function in some processes at once; returns its results by name.

        Args:
            function: the same in each.
            arguments: its further arguments, by process.
            deadline_s: for all results.

        Raises:
            WorkerError: a process died, raised, or has not answered in time; the message names it.
        """

        def bound(given: tuple[Any, ...]) -> Callable[[Any], Any]:
            return lambda instance: function(instance, *given)

        return self.call(function.__name__, {name: bound(given) for name, given in arguments.items()}, deadline_s)


class Inspector:
    """Is told how the start of a run goes on; this one does nothing with it."""

    def processes_are_up(self, machines: Machines) -> None:
        """Called before any process has loaded a model; what it raises ends the start."""

    def link_is_open(self, relink: Relink) -> None:
        """Called when trainer and sampler are connected."""


NOBODY = Inspector()
"""For a run that no companion looks at."""
