"""Questions to the run's processes over Ray."""

from collections.abc import Mapping
from typing import Any

from gtpo_megatron.orchestration.on_ray.collect import collect
from gtpo_megatron.orchestration.on_ray.fleet import engine_names
from gtpo_megatron.orchestration.on_ray.placement import Placement
from gtpo_megatron.orchestration.on_ray.start import rank_name
from gtpo_megatron.orchestration.stages.inspection import Question


class RayMachines:
    """See ``Machines``.

    Args:
        processes: of the run, by name; replaced engines are replaced in it.
        placement: of the processes.

    Attributes:
        ranks: names of the ranks.
        engines: names of the engines.
        hosts: host of each.
    """

    def __init__(self, processes: Mapping[str, Any], placement: Placement) -> None:
        self._processes = processes
        self.ranks = tuple(rank_name(index) for index in range(len(placement.ranks)))
        self.engines = tuple(engine_names(len(placement.engines)))
        nodes = (*placement.ranks, *placement.engines)
        self.hosts = {name: node.host for name, node in zip((*self.ranks, *self.engines), nodes, strict=True)}

    def ask(self, question: Question, arguments: Mapping[str, tuple[Any, ...]], *, deadline_s: float) -> dict[str, Any]:
        """Asks some processes at once."""
        calls = {name: self._processes[name].answer.remote(question, *given) for name, given in arguments.items()}
        return collect(calls, stage=question.__name__, deadline_s=deadline_s)
