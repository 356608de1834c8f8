"""``stages.engines.Engines`` over Ray; a dead engine is replaced."""

from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from gtpo_megatron.batch import RolloutBatch
from gtpo_megatron.config.rollout import SamplingConfig
from gtpo_megatron.orchestration.on_ray.fleet import EngineFleet
from gtpo_megatron.orchestration.on_ray.group_slices import RayGroupSampler
from gtpo_megatron.orchestration.stages.engines import Engines
from gtpo_megatron.orchestration.stages.rollouts import RolloutHandle, received

if TYPE_CHECKING:
    from gtpo_megatron.rollout.vllm_engine import VllmEngine

Answer = TypeVar("Answer")
Key = TypeVar("Key", bound=Hashable)


class RayEngines(Engines):
    """The engines as seen by one thread.

    An engine that dies is restarted with the weights of the others, and its requests are repeated; a response depends
    on its request and its seed only. Only the trainer's thread can push weights: in any other, a death raises
    EngineLostError.

    Args:
        fleet: the engines, shared by all threads.
        push_again: pushes a version to replaced engines; None outside the trainer's thread.
    """

    def __init__(self, fleet: EngineFleet, *, push_again: Callable[[int], None] | None) -> None:
        super().__init__(fleet.hosts, workers_per_engine=fleet.workers_per_engine)
        self._fleet = fleet
        self._push_again = push_again

    def call(self, stage: str, functions: "Mapping[int, Callable[[VllmEngine], Answer]]") -> dict[int, Answer]:
        """Calls engines at once, and restarted ones again."""

        def attempt(processes: dict[int, Any]) -> tuple[dict[int, Answer], set[int]]:
            calls = {index: process.answer.remote(functions[index]) for index, process in processes.items()}
            return self._fleet.wait(stage, calls)

        return self._until_answered(stage, attempt, functions)

    def sample(
        self, functions: "Mapping[int, Callable[[VllmEngine], Mapping[Key, RolloutBatch]]]"
    ) -> dict[int, dict[Key, RolloutHandle]]:
        """Calls engines at once, and restarted ones again; the responses stay in the object store."""

        def attempt(processes: dict[int, Any]) -> tuple[dict[int, dict[Key, RolloutHandle]], set[int]]:
            streams = {
                index: process.sample.options(num_returns="streaming").remote(functions[index])
                for index, process in processes.items()
            }
            ended, dead = self._fleet.wait("rollout", {index: stream.completed() for index, stream in streams.items()})
            return {index: received(streams[index]) for index in ended}, dead

        return self._until_answered("rollout", attempt, functions)

    def hold(self, rollouts: RolloutBatch) -> RolloutHandle:
        """Puts responses into the object store; returns their handle."""
        import ray

        return RolloutHandle.of_groups(rollouts, put=ray.put)

    @property
    def num_restarts(self) -> int:
        """Number of engines that died and were replaced."""
        return self._fleet.num_restarts

    def unattended(self) -> "RayEngines":
        """The same engines for another thread than the trainer's."""
        return RayEngines(self._fleet, push_again=None)

    def group_sampler(self, sampling: SamplingConfig, *, samples_per_prompt: int, seed: int) -> RayGroupSampler:
        """The engines for the thread of a continuous run."""
        return RayGroupSampler(self._fleet, sampling, samples_per_prompt=samples_per_prompt, seed=seed)

    def replace_lost(self) -> bool:
        """Restarts engines that other threads reported as lost; True if there were any. They need a push."""
        return self._fleet.replace_lost()

    def abandon(self) -> None:
        """Kills all engines."""
        self._fleet.abandon()

    def _until_answered(
        self,
        stage: str,
        attempt: Callable[[dict[int, Any]], tuple[dict[int, Answer], set[int]]],
        functions: Mapping[int, Any],
    ) -> dict[int, Answer]:
        """Repeats the attempt until all have answered; dead engines are replaced, or reported as lost.

        Args:
            stage: for messages.
            attempt: calls processes, by index; returns the answers of some, and the indices of dead ones.
            functions: by index of the engine.
        """
        left = list(functions)
        answers: dict[int, Answer] = {}
        while left:
            asked = self._fleet.processes(left)
            if self._push_again is None and stage == "rollout":
                self._fleet.refuse_without_weights(left)
            found, dead = attempt(asked)
            answers |= found
            left = sorted(dead)
            if left:
                if self._push_again is None:
                    self._fleet.report_lost({index: asked[index] for index in left}, stage)
                self._fleet.replace(left, stage)
                self._push_again(self._fleet.version)
        return answers
