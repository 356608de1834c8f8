"""Trainer and engines take turns as in a step: an engine that has slept gets its weights by a push."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from gtpo_megatron.companions.preflight.memory_watch import MemoryWatch
from gtpo_megatron.orchestration.stages.stages import Stages


class GpuHandover:
    """Hands shared GPUs over between trainer and engines.

    Args:
        stages: stages of a step after the start: the engines are asleep.
        memory: watch that counts the pushes' phase.

    Attributes:
        version: version of the trainer's weights.
        seconds: time of the last ``to_trainer``, ``to_push``, ``push`` and ``to_engine``.
    """

    def __init__(self, stages: Stages, memory: MemoryWatch) -> None:
        self._stages, self._memory = stages, memory
        self._turn: Literal["trainer", "engine"] | None = None
        self.version = 0
        self.seconds: dict[str, float] = {}

    def to_trainer(self, *, keep_weights: bool = False) -> None:
        """The trainer's turn."""
        if self._turn != "trainer":
            with self._timed("to_trainer"):
                self._stages.memory_sharing.to_trainer(keep_weights=keep_weights)
        self._turn = "trainer"

    def to_engine(self) -> None:
        """The engines' turn, with the trainer's weights.

        Raises:
            WeightSyncError: they did not arrive as they were sent.
        """
        if self._turn == "engine":
            return
        self.to_trainer()
        with self._timed("to_push"):
            self._stages.memory_sharing.to_push()
        with self._memory.phase("push"), self._timed("push"):
            self._stages.weight_sync.push(version=self.version)
        with self._timed("to_engine"):
            self._stages.memory_sharing.to_engine()
        self._turn = "engine"

    def count_update(self) -> None:
        """The trainer's weights are a new version, which the engines do not have."""
        self.version += 1

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - began
