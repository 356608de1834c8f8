"""The stages of a training step together, and the GPU memory that engines and trainer share.

::

    sample     engine: weights, keys and values          trainer: weights; gradients and optimizer are on the host
    train      engine: asleep                            trainer: everything
    push       engine: weights                           trainer: as while sampling
"""

from collections.abc import Callable
from dataclasses import dataclass

from gtpo_megatron.batch import PromptBatch, RewardBatch
from gtpo_megatron.config.rollout import WeightSyncConfig
from gtpo_megatron.observability.timers import StageTimers
from gtpo_megatron.orchestration.stages.engines import Engines
from gtpo_megatron.orchestration.stages.rollouts import RolloutHandle
from gtpo_megatron.orchestration.stages.trainer import Trainer
from gtpo_megatron.weights.push.sync import WeightSync


class MemorySharing:
    """Moves GPU memory between engines and trainer if they share GPUs; engines with their own move nothing.

    Args:
        trainer: the ranks.
        engine: the engines.
        is_colocated: whether ranks and engines share GPUs.
        timers: timers of the steps.
    """

    def __init__(self, trainer: Trainer, engine: Engines, *, is_colocated: bool, timers: StageTimers) -> None:
        self._trainer = trainer
        self._engine = engine
        self._is_colocated = is_colocated
        self._timers = timers

    def to_trainer(self, *, keep_weights: bool = False) -> None:
        """Puts the engine to sleep (``keep_weights`` of it) and moves the trainer's state to the GPU.

        For start, scoring, updates and checkpoints.
        """
        if self._is_colocated:
            with self._timers.stage("to_trainer"):
                self._engine.sleep(keep_weights=keep_weights)
                self._trainer.run_on_all("memory", lambda actor: actor.onload())

    def to_push(self) -> None:
        """Moves gradients and optimizer to the host and allocates the engine's weights."""
        if self._is_colocated:
            with self._timers.stage("to_push"):
                self._trainer.run_on_all("memory", lambda actor: actor.offload())
                self._engine.wake("weights")

    def to_engine(self) -> None:
        """Allocates the engine's key-value cache.

        Call it after a push, or after ``to_trainer(keep_weights=True)`` and ``to_push``.
        """
        if self._is_colocated:
            with self._timers.stage("to_engine"):
                self._engine.wake("kv_cache")


Grade = Callable[[RolloutHandle, PromptBatch], RewardBatch]
"""(3) Gives every response its outcome reward: in the reward process, in this one, or by the environment."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stages:
    """The stages of a training step, with their timers.

    Attributes:
        open_link: connects trainer and engines anew, with another transport; returns pushes over it.
    """

    engine: Engines
    grade: Grade
    trainer: Trainer
    weight_sync: WeightSync
    memory_sharing: MemorySharing
    timers: StageTimers
    open_link: Callable[[WeightSyncConfig], WeightSync]
