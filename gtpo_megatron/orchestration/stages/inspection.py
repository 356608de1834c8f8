"""Looking at the processes of a run while it starts, and asking them questions that are no stage of a step."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gtpo_megatron.config.rollout import WeightSyncConfig
from gtpo_megatron.weights.push.sync import WeightSync

Question = Callable[..., Any]
"""A function of a module that every process can import. Its first argument is what the process holds: a rank its
``MegatronActor``, an engine its ``VllmEngine``, None before it has started."""

Relink = Callable[[WeightSyncConfig], WeightSync]
"""Opens the link for pushes anew, with another transport."""


Call = Callable[[str, Mapping[str, Callable[[Any], Any]], float], dict[str, Any]]
"""Takes a stage, functions of what processes hold (by name of the process), and a deadline in seconds; returns their
answers by name. Raises WorkerError if a process died, raised, or has not answered in time."""


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

    def ask(self, question: Question, arguments: Mapping[str, tuple[Any, ...]], *, deadline_s: float) -> dict[str, Any]:
        """Asks some processes at once; returns their answers by name.

        Args:
            question: what each is asked.
            arguments: by process.
            deadline_s: for all answers.

        Raises:
            WorkerError: a process died, raised, or has not answered in time; the message names it.
        """

        def asked(given: tuple[Any, ...]) -> Callable[[Any], Any]:
            return lambda held: question(held, *given)

        return self.call(question.__name__, {name: asked(given) for name, given in arguments.items()}, deadline_s)


class Inspector:
    """Is told how the start of a run goes on; this one does nothing about it."""

    def processes_are_up(self, machines: Machines) -> None:
        """Called before any process has loaded a model; what it raises ends the start."""

    def link_is_open(self, relink: Relink) -> None:
        """Called when trainer and sampler are connected."""


NOBODY = Inspector()
"""Looks at nothing."""
