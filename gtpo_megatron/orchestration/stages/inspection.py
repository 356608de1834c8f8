"""Looking at the processes of a run while it starts, and asking them questions that are no stage of a step."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from gtpo_megatron.config.rollout import WeightSyncConfig
from gtpo_megatron.weights.push.sync import WeightSync

Question = Callable[..., Any]
"""A function of a module that every process can import. Its first argument is what the process holds: a rank its
``MegatronActor``, an engine its ``VllmEngine``, None before it has started."""

Relink = Callable[[WeightSyncConfig], WeightSync]
"""Opens the link for pushes anew, with another transport."""


class Machines(Protocol):
    """The processes of ranks and engines."""

    @property
    def ranks(self) -> tuple[str, ...]:
        """Names of the ranks, in order."""
        ...

    @property
    def engines(self) -> tuple[str, ...]:
        """Names of the engines, in order."""
        ...

    @property
    def hosts(self) -> Mapping[str, str]:
        """Host of each of them."""
        ...

    def ask(self, question: Question, arguments: Mapping[str, tuple[Any, ...]], *, deadline_s: float) -> dict[str, Any]:
        """Asks some processes at once; returns their answers by name.

        Args:
            question: what each is asked.
            arguments: by process.
            deadline_s: for all answers.

        Raises:
            WorkerError: a process died, raised, or has not answered in time; the message names it.
        """
        ...


class Inspector:
    """Is told how the start of a run goes on; this one does nothing about it."""

    def processes_are_up(self, machines: Machines) -> None:
        """Called before any process has loaded a model; what it raises ends the start."""

    def link_is_open(self, relink: Relink) -> None:
        """Called when trainer and sampler are connected."""


NOBODY = Inspector()
"""Looks at nothing."""
