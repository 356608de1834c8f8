"""Where the responses of every step come from: sampled step by step, or continuously."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.orchestration.loop.sampling import DrawPrompts, NoteOutcomes, SampledStep, no_note
from gtpo_megatron.orchestration.stages.stages import Stages


class RolloutPipeline(Protocol):
    """Provides the responses of every step, in order."""

    def begin_at(self, step: int) -> None:
        """Sets the first step; before ``load_state_dict``."""
        ...

    def take(self, step: int) -> SampledStep:
        """Returns the responses of a step.

        Raises:
            GTPOError: sampling or grading failed.
        """
        ...

    def before_push(self) -> None:
        """Waits until the engines can take new weights."""
        ...

    def after_push(self, version: int) -> None:
        """Goes on with the weights of this version, which every engine has."""
        ...

    def drain(self) -> None:
        """Waits until no request is in flight, before other uses of the engines; call it after a push."""
        ...

    def frozen(self) -> AbstractContextManager[Callable[[], dict[str, Any]]]:
        """Within the block no prompt is drawn. Yields a function that returns the state of its beginning.

        The state has tensors and plain values only.
        """
        ...

    def load_state_dict(self, state: dict[str, Any], *, step: int) -> None:
        """Continues after a step from a ``state_dict``."""
        ...

    def close(self) -> None:
        """Ends what is in flight, if a run ends early."""
        ...


def rollout_pipeline(
    draw: DrawPrompts, stages: Stages, config: RunConfig, note: NoteOutcomes = no_note
) -> RolloutPipeline:
    """The pipeline that the configuration asks for.

    Args:
        draw: draws prompts; never called by two threads at once.
        stages: the stages of a step.
        config: the run's configuration.
        note: is told how every group came out.
    """
    if config.rollout.is_continuous:
        from gtpo_megatron.orchestration.loop.continuous import ContinuousSampling

        return ContinuousSampling(draw, stages, config, note)
    from gtpo_megatron.orchestration.loop.stepwise import StepwiseSampling

    return StepwiseSampling(draw, stages, config, note)
