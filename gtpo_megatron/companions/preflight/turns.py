"""Switches GPUs that trainer and engines share from one to the other, and times it; does nothing on separate GPUs."""

import time
from typing import Literal

from gtpo_megatron.companions.preflight.memory_watch import MemoryWatch
from gtpo_megatron.orchestration.stages.stages import Stages


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
