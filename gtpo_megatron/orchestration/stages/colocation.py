"""Sharing of GPU memory between engines and trainer.

::

    sample     engine: weights, keys and values          trainer: weights; gradients and optimizer are on the host
    train      engine: asleep                            trainer: everything
    push       engine: weights                           trainer: as while sampling
"""

from gtpo_megatron.config.rollout import RolloutConfig
from gtpo_megatron.orchestration.stages.protocols import Actor, Engine, MemorySharing


class Disaggregated(MemorySharing):
    """Engines have their own GPUs, so nothing is moved."""

    def to_trainer(self, *, keep_weights: bool = False) -> None:
        """Does nothing."""

    def to_push(self) -> None:
        """Does nothing."""

    def to_engine(self) -> None:
        """Does nothing."""


class Colocated(MemorySharing):
    """Engines and trainer use the same GPUs alternately."""

    def __init__(self, actor: Actor, engine: Engine) -> None:
        self._actor = actor
        self._engine = engine

    def to_trainer(self, *, keep_weights: bool = False) -> None:
        """Puts the engine to sleep and moves the trainer's state to the GPU."""
        self._engine.sleep(keep_weights=keep_weights)
        self._actor.onload()

    def to_push(self) -> None:
        """Moves gradients and optimizer to the host and allocates the engine's weights."""
        self._actor.offload()
        self._engine.wake("weights")

    def to_engine(self) -> None:
        """Allocates the engine's key-value cache."""
        self._engine.wake("kv_cache")


def memory_sharing_of(config: RolloutConfig, actor: Actor, engine: Engine) -> MemorySharing:
    """The implementation for the placement of the engines."""
    return Colocated(actor, engine) if config.placement == "colocated" else Disaggregated()
