"""Megatron ranks and pushes over Ray: remote calls that return handles and small numbers."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from gtpo_megatron.distributed.groups import RankCoordinates
from gtpo_megatron.orchestration.on_ray.collect import collect
from gtpo_megatron.orchestration.on_ray.fleet import EngineFleet
from gtpo_megatron.weights.checksum import Checksums
from gtpo_megatron.weights.push.sync import merge_checksums

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from gtpo_megatron.actor.actor import MegatronActor
    from gtpo_megatron.orchestration.on_ray.processes import RankProcess

Result = TypeVar("Result")


class RayRanks:
    """``stages.trainer.Ranks`` as Ray actors.

    Args:
        processes: the ranks' processes, by global rank.
        coordinates: place of each in the parallel layout.
        hosts: host of each.
        deadline_s: longest time for one call.
    """

    def __init__(
        self,
        processes: "Sequence[ActorHandle[RankProcess]]",
        coordinates: Sequence[RankCoordinates],
        *,
        hosts: Sequence[str],
        deadline_s: float,
    ) -> None:
        self.coordinates = list(coordinates)
        self.hosts = list(hosts)
        self._processes = list(processes)
        self._deadline_s = deadline_s

    def run_on_each(self, stage: str, functions: "Sequence[Callable[[MegatronActor], Result]]") -> list[Result]:
        """See ``Ranks``."""
        calls = self.begin(functions)
        results = collect(calls, stage=stage, deadline_s=self._deadline_s)
        return [results[name] for name in calls]

    def begin(self, functions: "Sequence[Callable[[MegatronActor], Any]]") -> dict[str, Any]:
        """Starts a call on each rank; returns the calls by name of the rank."""
        return {
            str(rank): process.run.remote(function)
            for rank, process, function in zip(self.coordinates, self._processes, functions, strict=False)
        }


class RayTransfer:
    """Runs both sides of a push."""

    def __init__(self, ranks: RayRanks, fleet: EngineFleet, *, deadline_s: float) -> None:
        self._ranks, self._fleet, self._deadline_s = ranks, fleet, deadline_s

    def __call__(self, version: int, *, with_checksums: bool) -> tuple[Checksums, Checksums]:
        """Sends and receives the weights of ``version``; returns the checksums of both sides."""

        def send(actor: "MegatronActor") -> Checksums:
            return actor.send_weights(version, with_checksums)

        sending = self._ranks.begin([send] * len(self._ranks.coordinates))
        receiving = self._fleet.receiving(version, with_checksums=with_checksums)
        results = collect(sending | receiving, stage="weight_sync", deadline_s=self._deadline_s)
        self._fleet.mark_received()
        sent = merge_checksums([results[name] for name in sending])
        return sent, merge_checksums([results[name] for name in receiving])
