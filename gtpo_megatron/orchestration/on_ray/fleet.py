"""The engine processes of a run: who died, replacement, and the link to the trainer."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from gtpo_megatron.config.rollout import RolloutConfig
from gtpo_megatron.errors import EngineLostError, WorkerError
from gtpo_megatron.orchestration.on_ray.collect import collect_survivors
from gtpo_megatron.weights.checksum import Checksums

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from gtpo_megatron.orchestration.on_ray.processes import EngineProcess
    from gtpo_megatron.rollout.vllm_engine import VllmEngine

logger = logging.getLogger(__name__)


def engine_names(num_engines: int) -> list[str]:
    """Names of the engines in messages."""
    return [f"rollout engine {index}" for index in range(num_engines)] if num_engines > 1 else ["rollout engine"]


class EngineFleet:
    """The vLLM engines of a run, each in its own process.

    One object per run, shared by the ``RayEngines`` of all threads.

    Args:
        processes: the engines' processes; a replacement takes the index of its predecessor.
        hosts: host of every worker, engine after engine.
        rollout: the engines' configuration.
        has_environment: requests need their problems.
        restart: restarts the engine with this index and waits until it is ready.
        deadline_s: longest time for one call.
        open_link: opens a new link from the trainer to all engines, unattended.
        expect_end: called with the name of an engine before it is killed on purpose.

    Attributes:
        names: names of the engines.
        hosts: host of every worker, engine after engine.
        workers_per_engine: workers of an engine.
        has_environment: whether requests need their problems.
        version: policy version of the last push.
        num_restarts: restarts so far.
        deadline_s: longest time for one call.
    """

    def __init__(
        self,
        processes: "list[ActorHandle[EngineProcess]]",
        *,
        hosts: Sequence[str],
        rollout: RolloutConfig,
        has_environment: bool = False,
        restart: "Callable[[int], ActorHandle[EngineProcess]]",
        deadline_s: float,
        open_link: Callable[[], None],
        expect_end: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._processes = processes
        self._restart_one = restart
        self._max_restarts = rollout.max_engine_restarts
        self._open_link = open_link
        self._expect_end = expect_end
        self.names = engine_names(len(processes))
        self.hosts = list(hosts)
        self.workers_per_engine = rollout.ranks_per_engine
        self.has_environment = has_environment
        self.deadline_s = deadline_s
        self.version = 0
        self.num_restarts = 0
        # by index the process that died, to distinguish it from its replacement
        self._lost: dict[int, ActorHandle[EngineProcess]] = {}
        self._without_weights: set[int] = set()
        self._is_link_new = True

    # ------------------------------------------------------------------------------------------------- calling engines
    def __len__(self) -> int:
        return len(self._processes)

    def processes(self, engines: Iterable[int]) -> "dict[int, ActorHandle[EngineProcess]]":
        """The current processes of these engines, by index."""
        return {index: self._processes[index] for index in engines}

    def wait(self, stage: str, calls: Mapping[int, Any]) -> tuple[dict[int, Any], set[int]]:
        """Waits for calls, by engine; returns the results of some, and the indices of dead engines."""
        results, dead = collect_survivors(
            {self.names[index]: call for index, call in calls.items()}, stage=stage, deadline_s=self.deadline_s
        )
        found = {index: results[self.names[index]] for index in calls if self.names[index] in results}
        return found, {index for index in calls if self.names[index] in dead}

    def note_lost(self, processes: "dict[int, ActorHandle[EngineProcess]]") -> None:
        """Records dead processes, for the trainer's thread to replace."""
        self._lost |= processes

    def report_lost(self, processes: "dict[int, ActorHandle[EngineProcess]]", stage: str) -> NoReturn:
        """Records dead processes, for the trainer's thread to replace.

        Raises:
            EngineLostError: always.
        """
        self.note_lost(processes)
        raise EngineLostError(f"{', '.join(self.names[index] for index in sorted(processes))} died in {stage}")

    def is_without_weights(self, engine: int) -> bool:
        """Whether an engine is waiting for its first push after a replacement."""
        return engine in self._without_weights

    def refuse_without_weights(self, engines: Iterable[int]) -> None:
        """Checks that no engine is waiting for its first push after a replacement.

        Raises:
            EngineLostError: one is.
        """
        waiting = sorted(self._without_weights.intersection(engines))
        if waiting:
            names = ", ".join(self.names[index] for index in waiting)
            raise EngineLostError(f"{names} died, and the successor has no weights yet")

    # ---------------------------------------------------------------------------------- the link and the pushes over it
    def reconnect(self) -> None:
        """Opens the link from the trainer to all engines, again if an engine dies meanwhile.

        Raises:
            WorkerError: more than ``max_restarts`` engines died.
        """
        self._is_link_new = True
        while True:
            try:
                self._open_link()
            except EngineLostError:
                self._restart_lost("weight_sync")
            else:
                return

    def receiving(self, version: int, *, with_checksums: bool) -> dict[str, Any]:
        """Starts the sampler's side of a push; returns calls by name."""
        self.version = version

        def receive(engine: "VllmEngine") -> Checksums:
            return engine.weights.receive(version, with_checksums=with_checksums)

        return {name: process.run.remote(receive) for name, process in zip(self.names, self._processes, strict=True)}

    def mark_received(self) -> None:
        """Records that a push has reached all engines."""
        self._without_weights.clear()
        self._is_link_new = False

    def replace_dead(self) -> bool:
        """Replaces dead engines before a push.

        Returns:
            Whether the link has had no push yet.
        """
        processes = self.processes(range(len(self)))
        calls = {index: process.identity.remote() for index, process in processes.items()}
        _, dead = self.wait("weight_sync", calls)
        self._lost |= {index: processes[index] for index in dead}
        if self._restart_lost("weight_sync"):
            self.reconnect()
        return self._is_link_new

    # ------------------------------------------------------------------------------------------------------- replacing
    def replace(self, engines: Sequence[int], stage: str) -> None:
        """Restarts dead engines and reconnects them; a push must follow.

        Raises:
            WorkerError: more than ``max_restarts`` engines died.
        """
        self._restart(engines, stage)
        self.reconnect()

    def replace_lost(self) -> bool:
        """Restarts and reconnects engines that were reported as lost; returns whether there were any."""
        is_any_lost = self._restart_lost("rollout")
        if is_any_lost:
            self.reconnect()
        return is_any_lost

    def _restart_lost(self, stage: str) -> bool:
        reported = dict(self._lost)
        lost = sorted(index for index, process in reported.items() if self._processes[index] is process)
        if lost:
            self._restart(lost, stage)
        for index, process in reported.items():
            if self._lost[index] is process:
                del self._lost[index]
        return bool(lost)

    def _restart(self, engines: Sequence[int], stage: str) -> None:
        import ray

        names = ", ".join(self.names[index] for index in engines)
        if self.num_restarts + len(engines) > self._max_restarts:
            raise WorkerError(
                f"{names} died in {stage}, after {self.num_restarts} restarts in this run "
                f"(rollout.max_engine_restarts={self._max_restarts}); see log.txt, and the system log for an "
                f"out-of-memory kill"
            )
        self.num_restarts += len(engines)
        logger.warning(
            "%s died in %s and will be replaced (%d of at most %d replacements in this run); then it is asked again",
            names,
            stage,
            self.num_restarts,
            self._max_restarts,
        )
        self._without_weights |= set(engines)  # first, since other threads may sample
        for index in engines:
            self._expect_end(self.names[index])
            ray.kill(self._processes[index])  # it may be unreachable but alive, and hold its GPUs
            self._processes[index] = self._restart_one(index)

    def abandon(self) -> None:
        """Kills all engines."""
        import ray

        for name, process in zip(self.names, self._processes, strict=True):
            self._expect_end(name)
            ray.kill(process)
