"""Whose turn it is to fill the GPUs, where engines and trainer share them.

::

    sample     engine: weights, keys and values          trainer: weights; gradients and optimizer are on the host
    train      engine: asleep                            trainer: everything
    push       engine: weights                           trainer: everything
"""

from gtpo_megatron.config.rollout import RolloutConfig
from gtpo_megatron.orchestration.stages.protocols import Actor, Engine, MemoryTurns


class Disaggregated(MemoryTurns):
    """Engines have GPUs of their own: nobody has to move."""

    def to_trainer(self, *, keep_weights: bool = False) -> None:
        """Nothing."""

    def to_push(self) -> None:
        """Nothing."""

    def to_engine(self) -> None:
        """Nothing."""


class Colocated(MemoryTurns):
    """Engines and trainer take turns on the same GPUs."""

    def __init__(self, actor: Actor, engine: Engine) -> None:
        self._actor = actor
        self._engine = engine

    def to_trainer(self, *, keep_weights: bool = False) -> None:
        """The engine lets its memory go, the trainer gets its own back."""
        self._engine.sleep(keep_weights=keep_weights)
        self._actor.onload()

    def to_push(self) -> None:
        """The engine makes room for its weights."""
        self._engine.wake("weights")

    def to_engine(self) -> None:
        """Gradients and optimizer go to the host, the engine makes room for keys and values."""
        self._actor.offload()
        self._engine.wake("kv_cache")


def gpu_turns(config: RolloutConfig, actor: Actor, engine: Engine) -> MemoryTurns:
    """What the placement of the engines asks for."""
    return Colocated(actor, engine) if config.placement == "colocated" else Disaggregated()
